"""What a model is, and how ranks share it: shapes, parallel sizes, and which layers and parameters each pipeline rank has."""
