"""How long tests wait: so that none fails because others keep the processor busy. How fast things are is for `benchmarks/` to show."""

AT_ONCE = 20.0   # seconds: what has to wait for nobody is over by then, anywhere; the time-outs of a test are far below or far above
