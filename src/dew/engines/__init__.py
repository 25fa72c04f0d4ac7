"""Training engines: `dew.engines.trl` from one machine to several nodes, `dew.engines.verl` on clusters.

Each engine is imported only when used. The modules here are shared by all: credit on whole groups, metrics, the run's
log, supported versions.
"""
