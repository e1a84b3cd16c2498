"""Times and other properties of a device: from the peak rates of its kind, or from a measured profile."""
