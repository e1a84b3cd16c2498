"""Device properties and layer times, computed from peak rates or read from a measured profile."""
