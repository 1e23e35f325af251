"""One file per benchmark; `antiphon bench NAME` runs it."""
