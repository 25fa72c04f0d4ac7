"""What trains: `dew.engines.trl` from one machine to several nodes. Each engine is imported where it is used."""
