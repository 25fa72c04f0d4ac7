"""Credit on whole groups, which all engines share: `dew.engines.credit`."""

from dew.engines.credit import Credit, Rows, give_credit, judge

__all__ = ["Credit", "Rows", "give_credit", "judge"]
