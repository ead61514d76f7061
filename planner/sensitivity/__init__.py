"""How firm a decision is: which single constant would put another plan first, and at what value."""
