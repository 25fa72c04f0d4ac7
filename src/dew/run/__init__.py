"""What a run is: its config, its folder with metrics and token records, alarms, and what a config may do."""
