"""Training engines: `dew.engines.trl` from one machine to several nodes, `dew.engines.verl` on clusters.

Each engine is imported where it is used. What they share is here: credit on whole groups, metrics, the run's log,
supported versions.
"""
