"""`antiphon chaos`: prove on the real tree that nothing is lost."""
