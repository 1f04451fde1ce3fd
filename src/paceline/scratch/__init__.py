"""THE TEXTBOOK: data parallelism from torch's primitives alone, each file readable and runnable by itself.

Read in this order:

    sampler     who sees which sample            python -m paceline.scratch.sampler
    replicate   every rank starts the same       torchrun --nproc-per-node 2 -m paceline.scratch.replicate
    reduce      every rank takes the same step   torchrun --nproc-per-node 2 -m paceline.scratch.reduce
    batchnorm   statistics of the whole batch    torchrun --nproc-per-node 2 -m paceline.scratch.batchnorm
    tree        the same bits for any N          torchrun --nproc-per-node 3 -m paceline.scratch.tree
    norm        of gradients cut into shares     python -m paceline.scratch.norm
    scatter     each rank sums a share           used by zero
    zero        a share of the optimizer's state torchrun --nproc-per-node 2 -m paceline.scratch.zero

It is not a toy beside the product: the strategies `manual`, `bucketed`, `exact` and `zero` only call what stands here.
"""
