"""Plans that change: by phase, by iteration, and over a region of loads and lengths."""
