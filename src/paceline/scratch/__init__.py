"""THE TEXTBOOK: training on many devices from torch's primitives alone, a page for each idea, each runnable by itself.

Read in this order:

    sampler     who sees which sample            python -m paceline.scratch.sampler
    replicate   every rank starts the same       torchrun --nproc-per-node 2 -m paceline.scratch.replicate
    reduce      every rank takes the same step   torchrun --nproc-per-node 2 -m paceline.scratch.reduce
    batchnorm   statistics of the whole batch    torchrun --nproc-per-node 2 -m paceline.scratch.batchnorm
    tree        the same bits for any N          torchrun --nproc-per-node 3 -m paceline.scratch.tree
    norm        of gradients cut into shares     python -m paceline.scratch.norm
    scatter     each rank sums a share           torchrun --nproc-per-node 2 -m paceline.scratch.scatter
    zero        a share of the optimizer's state torchrun --nproc-per-node 2 -m paceline.scratch.zero
    tensor      a share of each layer's work     torchrun --nproc-per-node 2 -m paceline.scratch.tensor
    pipeline    a share of the layers            torchrun --nproc-per-node 2 -m paceline.scratch.pipeline

The strategy `manual` trains with `reduce`. What the other strategies use is in `paceline.sums`: longer, because it is
fast and refuses what is wrong; tests/scratch/test_equal.py proves both equal, bit for bit. `tensor` and `pipeline`
share out the model, which no strategy does yet: examples and tests compare them with one process in float64.
"""
