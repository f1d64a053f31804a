"""Operator n-grams: rewrites of a problem are the same set, another operator is another one."""

import pytest

from dedup.signature import Signature, jaccard, ngrams_of, operator_key, signature
from runtime.problem_code import load_module
from runtime.trace import trace_operators

ORIGINAL = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return torch.relu(self.fc(x) * self.scale).mean(dim=1)

def get_inputs():
    return [torch.rand(4, 8)]

def get_init_inputs():
    return [8]
"""
FORWARD = "return torch.relu(self.fc(x) * self.scale).mean(dim=1)"
REWRITES = {
    "renamed": ORIGINAL.replace("fc", "projection").replace("x", "features").replace("scale", "g"),
    "other sizes": ORIGINAL.replace("4, 8", "64, 8").replace("6", "12"),
    "functional": ORIGINAL.replace("torch.relu", "F.relu").replace(
        "self.fc(x)", "F.linear(x, self.fc.weight, self.fc.bias)"
    ),
    "modules": ORIGINAL.replace("torch.relu(", "nn.ReLU()("),
    "split": ORIGINAL.replace(
        FORWARD, "y = self.fc(x); y = y * self.scale; y = y.relu_(); return torch.mean(y, -1)"
    ),
    "commuted": ORIGINAL.replace("self.fc(x) * self.scale", "self.scale * self.fc(x)"),
    "helper": ORIGINAL.replace(FORWARD, "return self.tail(self.fc(x))\n")
    + "\nModel.tail = lambda self, y: torch.relu(y * self.scale).mean(dim=1)\n",
    "moves": ORIGINAL.replace("self.fc(x)", "self.fc(x.contiguous().clone()).view(-1, 6)"),
    "by hand": ORIGINAL.replace("self.fc(x)", "(x @ self.fc.weight.T + self.fc.bias)"),
}


def of(code: str) -> Signature:
    return signature(trace_operators(load_module(code, "signed")))


@pytest.mark.parametrize("kind", REWRITES)
def test_rewrites_have_similarity_one(kind: str) -> None:
    assert REWRITES[kind] != ORIGINAL
    assert jaccard(of(ORIGINAL).ngrams, of(REWRITES[kind]).ngrams) == 1.0


@pytest.mark.parametrize("other", ["sigmoid", "tanh", "exp"])
def test_another_operator_is_another_problem(other: str) -> None:
    changed = of(ORIGINAL.replace("torch.relu", f"torch.{other}"))
    assert jaccard(of(ORIGINAL).ngrams, changed.ngrams) < 0.6


def test_constant_no_ops_leave_the_operators_but_not_the_ngrams() -> None:
    padded = of(ORIGINAL.replace("self.fc(x)", "(self.fc(x) + 0) * 1"))
    assert padded.operators == of(ORIGINAL).operators
    assert padded.ngrams != of(ORIGINAL).ngrams
    assert ngrams_of(padded.operators) == of(ORIGINAL).ngrams


def test_another_dimension_differs_in_attributes_only() -> None:
    left, right = of(ORIGINAL), of(ORIGINAL.replace("mean(dim=1)", "mean(dim=0)"))
    assert left.ngrams == right.ngrams
    assert jaccard(left.ngrams_attributes, right.ngrams_attributes) < 0.8


def test_ngrams_of_two_operators_by_hand() -> None:
    assert set(ngrams_of(["relu", "relu"])) == {
        *("relu", "relu#2"),
        *("^>relu", "relu>relu", "relu>$"),
        *("^>relu>relu", "relu>relu>$"),
    }


def test_no_operators_left_still_gives_a_set() -> None:
    assert ngrams_of([]) == ("^>$",)


def test_a_graph_without_operators_is_refused() -> None:
    with pytest.raises(ValueError, match="without any"):
        signature([])


def test_repetition_counts() -> None:
    once, twice = ngrams_of(["conv2d", "relu"]), ngrams_of(["conv2d", "relu", "relu"])
    assert operator_key(once) != operator_key(twice)
    assert jaccard(once, twice) == 6 / 11  # unigrams 2/3, bigrams 3/4, trigrams 1/4


def test_jaccard_of_hand_sized_sets() -> None:
    assert jaccard("abcd", "abce") == 3 / 5
    assert jaccard("", "") == 0.0
