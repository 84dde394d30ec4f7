"""Pipeline parallel. A schedule is data: functions make it, passes add messages, it is checked, simulated, drawn, and then run."""
