"""What trains: `dew.engines.trl` from one machine to several nodes, `dew.engines.verl` on clusters.

Each engine is imported where it is used. What both do lies here: credit on whole groups, metrics, the run's log.
"""
