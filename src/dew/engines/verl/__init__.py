"""Training on verl, on clusters: credit of dew's inside verl's trainer."""
