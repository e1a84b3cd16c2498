"""Model shapes, parallel sizes, and the layers and parameters of each pipeline rank."""
