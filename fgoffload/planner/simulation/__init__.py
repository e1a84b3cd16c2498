"""Simulates a step of all pipeline ranks, pass by pass, including copies and memory."""
