"""Which plan: what layers may choose from, what that costs, and the search for the fastest within a memory budget.

And what Megatron's own flags would come to.
"""
