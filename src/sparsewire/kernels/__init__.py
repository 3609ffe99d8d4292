"""The inner loops: deposit, choose, withdraw.

`reference` says what each one means, in plain torch, on any device. A faster version of the same
function goes into a module of its own beside it and must agree with the reference bit for bit.
"""
