"""Why a figure is what it is: its terms, the floor of physics, what another plan does differently, what would help."""
