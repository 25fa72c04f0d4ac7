"""A run: its config, its folder with metrics and token records, its alarms, and limits on untrusted configs."""
