"""Model shapes and their split over ranks: parallel sizes, and the layers and parameters of each pipeline rank."""
