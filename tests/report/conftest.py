"""Fixtures of the tests of what is shown of runs."""

from tests.small_mnist import small_mnist as small_mnist
