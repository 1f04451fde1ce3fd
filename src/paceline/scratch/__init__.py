"""THE TEXTBOOK: data parallelism from torch's primitives alone, each file readable and runnable by itself.

Read in this order:

    sampler     who sees which sample            python -m paceline.scratch.sampler
    replicate   every rank starts the same       torchrun --nproc-per-node 2 -m paceline.scratch.replicate
    reduce      every rank takes the same step   torchrun --nproc-per-node 2 -m paceline.scratch.reduce
    batchnorm   statistics of the whole batch    torchrun --nproc-per-node 2 -m paceline.scratch.batchnorm

It is not a toy beside the product: the strategies `manual` and `bucketed` only call what stands here.
"""
