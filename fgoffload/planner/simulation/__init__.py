"""Simulates a step of all pipeline ranks, pass by pass, with copies and memory."""
