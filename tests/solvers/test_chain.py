"""Chains cover the problem, and every tree of decisions becomes a valid schedule."""

import random

from autockpt_solvers import simulate
from autockpt_solvers.chain import MOST_SEGMENTS, Checkpoint, Save, chains, realise
from autockpt_solvers.on_demand import Demand, stage_schedule
from chain_problems import random_chain, uniform_chain
from random_problems import random_problem


def random_tree(rng, start, end):
    if start == end:
        return Save(start)
    if rng.random() < 0.4:
        return Save(start, random_tree(rng, start + 1, end))
    middle = rng.randint(start + 1, end)
    return Checkpoint(middle, random_tree(rng, middle, end), random_tree(rng, start, middle - 1))


def test_segments_cover_the_step_in_order():
    several = 0
    for seed in range(100):
        problem = random_problem(seed, most=20)
        for chain in chains(Demand(problem)):
            several += len(chain.segments) > 1
            assert [i for ops in chain.segments for i in ops] == list(problem.forward)
            offsets = [k for ops in reversed(chain.backward) for k in ops]
            assert offsets == list(range(len(problem.backward)))
            for ops, crossing, saved in zip(
                chain.segments, chain.crossing, chain.saved, strict=True
            ):
                made = {s for i in ops for s in problem.operations[i].outputs}
                assert crossing | saved <= made - chain.aside
    assert several > 60


def test_every_link_of_a_chain_is_a_segment():
    first = next(chains(Demand(uniform_chain(30))))
    assert [len(ops) for ops in first.segments] == [1] * 30
    assert [len(ops) for ops in first.backward] == [1] * 30
    assert not first.aside


def test_long_chains_are_thinned():
    (chain,) = chains(Demand(uniform_chain(3 * MOST_SEGMENTS)))
    assert len(chain.segments) == MOST_SEGMENTS


def test_every_tree_is_a_valid_schedule():
    for seed in range(200):
        rng = random.Random(seed)
        problem = random_problem(seed, most=20) if seed % 2 else random_chain(seed, 8)
        for chain in chains(Demand(problem)):
            order = realise(chain, random_tree(rng, 0, len(chain.segments) - 1))
            simulate(problem, stage_schedule(problem, order))
