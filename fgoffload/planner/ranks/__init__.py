"""Models of pipeline ranks, computed or measured: layers, chunks and the order of passes."""
