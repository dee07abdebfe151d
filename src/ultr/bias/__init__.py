"""Position bias of a log: how likely users are to look at a position (examination), or to trust it."""
