"""The schemes of the golden corpus, by names that outlive their notation."""

SCHEMES = {
    # every selector, alone
    "dense": "Dense()",
    "top_k": "TopK(0.05)",
    "top_k_count": "TopK(count=7)",
    "top_k_all": "TopK(1.0)",
    "threshold": "Threshold(0.05, sample=500)",
    "random_k_shared": "RandomK(0.05)",
    "random_k_own": "RandomK(0.05, shared=False)",
    "block_random_k_own": "BlockRandomK(0.05)",
    "block_random_k_shared": "BlockRandomK(0.05, shared=True)",
    "top_block": "TopBlock(0.1, block=16)",
    "leader_top_k": "LeaderTopK(0.05)",
    "union_top_k": "UnionTopK(0.05)",
    # every scope, and what is sent densely
    "top_k_global": "Scheme(TopK(0.05), scope='global')",
    "top_k_chunks": "Scheme(TopK(0.05), scope=100)",
    "top_k_nothing_whole": "Scheme(TopK(0.05), dense_below=0, dense_1d=False)",
    "threshold_global": "Scheme(Threshold(0.05, sample=500), scope='global')",
    "random_k_chunks": "Scheme(RandomK(0.05), scope=100)",
    "union_top_k_global": "Scheme(UnionTopK(0.05), scope='global')",
    "top_block_chunks": "Scheme(TopBlock(0.1, block=16), scope=100)",
    # every value codec
    "bfloat16": "Scheme(TopK(0.05), values=BFloat16())",
    "float16": "Scheme(TopK(0.05), values=Float16())",
    "one_bit_global": "Scheme(TopK(0.05), values=OneBit())",
    "one_bit_column": "Scheme(TopK(0.05), values=OneBit('column'))",
    "one_bit_threshold": "Scheme(TopK(0.05), values=OneBit('threshold'))",
    "two_bit": "Scheme(TopK(0.05), values=TwoBit())",
    "k_bit": "Scheme(TopK(0.05), values=KBit(bits=3))",
    "lloyd_max": "Scheme(TopK(0.05), values=LloydMax(3))",
    "qsgd": "Scheme(TopK(0.05), values=QSGD())",
    "dense_bfloat16": "Scheme(Dense(), values=BFloat16())",
    "random_k_two_bit": "Scheme(RandomK(0.05), values=TwoBit())",
    # every index codec
    "bitmap": "Scheme(TopK(0.05), indices=Bitmap())",
    "int32": "Scheme(TopK(0.05), indices=Int32())",
    "union_top_k_int32": "Scheme(UnionTopK(0.05), indices=Int32())",
    # every memory
    "no_memory": "Scheme(TopK(0.05), memory=NoMemory())",
    "momentum": "Scheme(TopK(0.05), memory=MomentumCorrection(0.9))",
    "nesterov_clipped": (
        "Scheme(TopK(0.05), memory=MomentumCorrection(0.9, nesterov=True, clip=1.0))"
    ),
    "momentum_not_masked": "Scheme(RandomK(0.05), memory=MomentumCorrection(0.9, masking=False))",
    "narrow_memory": "Scheme(TopK(0.05), memory=ErrorFeedback('bfloat16'))",
    "narrow_momentum": "Scheme(TopK(0.05), memory=MomentumCorrection(0.9, dtype='bfloat16'))",
    # every collective
    "random_k_gathered": "Scheme(RandomK(0.05), collective=AllGather())",
    "leader_top_k_gathered": "Scheme(LeaderTopK(0.05), collective=AllGather())",
    "sharded": "Scheme(TopK(0.05), collective=Sharded())",
    "sharded_all": "Scheme(TopK(0.05), collective=Sharded(1.0))",
    "sharded_two_bit": "Scheme(TopK(0.05), values=TwoBit(), collective=Sharded(0.02))",
    "sharded_threshold": "Scheme(Threshold(0.05, sample=500), collective=Sharded())",
    "sharded_random_k": "Scheme(RandomK(0.05), collective=Sharded())",
    "sharded_blocks": "Scheme(BlockRandomK(0.05), collective=Sharded())",
    "sharded_global": "Scheme(TopK(0.05), collective=Sharded(), scope='global')",
    "sharded_momentum": (
        "Scheme(TopK(0.05), memory=MomentumCorrection(0.9), collective=Sharded())"
    ),
    "sharded_narrow_memory": (
        "Scheme(TopK(0.05), memory=ErrorFeedback('bfloat16'), collective=Sharded())"
    ),
    # schemes that change with the step
    "warm_up": "Warmup(TopK(0.05), steps=2)",
    "eased_in": "Warmup(TopK(0.05), steps=3, ease=True)",
    "warm_up_sharded": "Warmup(Scheme(TopK(0.05), collective=Sharded()), steps=2)",
    # another seed
    "seed": "Scheme(RandomK(0.05), seed=7)",
}
