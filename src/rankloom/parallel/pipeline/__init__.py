"""Pipeline parallel: a schedule is data, made by functions, completed by passes, proven, priced, drawn, and then executed."""
