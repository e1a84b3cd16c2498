"""What a training would need, in plain numbers: no torch, no framework and no device.

`layer_shape` describes a layer as a rank runs it, and `saved_bytes` says what each tag of it saves for backward. The formulas,
where they come from and what they were compared with are on the page docs/formulas.md. `schedule` says in which order a
pipeline rank runs its microbatches, and `hardware` what they run on: docs/planner.md.
"""
