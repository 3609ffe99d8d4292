"""Where users plug in: `ddp` for DistributedDataParallel, `optimizer` for any module without it,
`functional` for people who write their own loop."""
