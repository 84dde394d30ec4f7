"""Show what was run: progress lines, histories, plots, drawings of a mesh. Values in, text and pictures out; only history reads files."""
