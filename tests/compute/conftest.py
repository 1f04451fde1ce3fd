"""What torch imports when it first checkpoints or steps changes the environment, once; that is no test's doing."""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint


@pytest.fixture(scope="session", autouse=True)
def imported():
    before = dict(os.environ)
    x = torch.ones(1, requires_grad=True)
    checkpoint(torch.exp, x, use_reentrant=False).backward()
    torch.optim.SGD([x], lr=0.1).step()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
