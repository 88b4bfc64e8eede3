"""Which operators run once, which for each part, and which when all parts have run.

Values are classed by storage, walking both traces together. A refusal names the first operator that
would need a value reduced over the whole batch to go on with single samples.
"""

from __future__ import annotations

from gpumux.client.ledger import Record
from gpumux.client.microbatch.pairs import Pair, scaled
from gpumux.client.microbatch.tables import (
    BATCH_NORMS,
    DIVISIONS,
    LINEAR,
    MEAN,
    NLL_FORWARD,
    PATTERN_ONLY,
    PRODUCTS,
)  # fmt: skip
from gpumux.client.microbatch.values import Kind, Level, Plan, Setting, Values, training, writes
from gpumux.errors import NotSplittable


def classify(
    pairs: list[Pair], full: Record, part: Record, count: int, setting: Setting, exits: list[int], results: list[int]
) -> Plan:
    """`exits`, `results`: views of the whole trace that outlive the step, that it returns. Raises NotSplittable."""
    forced: set[int] = set()
    border = len(pairs)
    while True:
        walk = _Walk(pairs, full, part, count, setting, forced, border)
        walk.run()
        if walk.force - forced:
            forced |= walk.force
        elif walk.border < border:
            border = walk.border
        else:
            break
    for view in exits:
        walk.need(full.views[view].storage, len(pairs), "the step")
    for view in results:
        storage = full.views[view].storage
        if walk.kinds[storage] not in (Kind.SAMPLE, Kind.DATA):
            walk.need(storage, len(pairs), "the step")
    return walk.plan


class _Walk(Values):
    def run(self) -> None:
        last_reduction = -1
        for j, pair in enumerate(self.pairs):
            level, outs = self._decide(j, pair)
            self.plan.levels.append(level)
            self.plan.outs.append(outs)
            self.apply(j, pair, level, outs)
            born_shares = any(k is Kind.SHARE for _, _, k in outs)
            if level is Level.PART and born_shares and not self.has(pair, Kind.SHARE):
                last_reduction = j
            if level is Level.TAIL and self._updates(pair) and self.border == self.limit:
                self.border = min(self.limit, last_reduction + 1)

    def _updates(self, pair: Pair) -> bool:
        """Whether the backward passes are over: a change to state other than gradients that add up in it."""
        changed = [self.full.storages[s] for s in self.changed(pair)]
        return any(s.kind == "state" and s.key not in self.setting.gradients for s in changed)

    # ---- one operator ------------------------------------------------------------------------------

    def _decide(self, j: int, pair: Pair) -> tuple[Level, list[tuple[int, int, Kind]]]:
        kinds = self.arguments(pair)
        changed = self.changed(pair)
        if Kind.LATE in kinds or changed & self.tail:
            return self._tail_op(j, pair, kinds)
        if pair.name in PATTERN_ONLY:
            if set(kinds) <= {Kind.SAME} and pair.same:
                return Level.ONCE, self.outs(pair, Kind.SAME, Kind.SAME)
            return Level.PART, self.outs(pair, Kind.SIZE, Kind.SAMPLE)
        samples = Kind.SAMPLE in kinds or Kind.DATA in kinds
        if Kind.SHARE in kinds:
            return self._share_op(j, pair, kinds, samples)
        if samples:
            return self._sample_op(j, pair, kinds)
        if Kind.SIZE in kinds or not pair.same or j in self.forced:
            return self._size_op(j, pair, kinds)
        if changed & (self.part_read | self.part_wrote):  # it overwrites what a part has used already
            if self.changes_state(pair):
                return self._tail_op(j, pair, kinds)
            return self._size_op(j, pair, kinds)
        return Level.ONCE, self.outs(pair, Kind.SAME, Kind.SAME)

    def _tail_op(self, j: int, pair: Pair, kinds: list[Kind]) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if Kind.SAMPLE in kinds or Kind.DATA in kinds:
            late = [self.full.views[a].storage for a, _ in pair.refs if self.kind(a) is Kind.LATE]
            if not late:
                raise self.refuse(
                    pair, "changes a value after the whole batch has used it, together with single samples"
                )
            if any(self.full.storages[s].kind == "state" for s in late):
                raise self.refuse(pair, "reads state that the step has changed by then, together with single samples")
            cause = self.causes[late[0]]
            raise self.refuse(
                pair,
                f"uses, together with single samples, what {cause.name} at {cause.full.where} makes of the whole batch",
            )
        known = [self.causes[s] for a, _ in pair.refs if (s := self.full.views[a].storage) in self.causes]
        self.causes.update(dict.fromkeys(writes(pair), known[0] if known else pair))
        for view, _ in pair.refs:
            self.need(self.full.views[view].storage, j, pair.full.where)
        return Level.TAIL, self.outs(pair, Kind.LATE, Kind.LATE)

    def _share_op(
        self, j: int, pair: Pair, kinds: list[Kind], samples: bool
    ) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if samples:
            raise self.refuse(pair, "uses a value reduced over the whole batch together with single samples")
        if j >= self.limit or not self._linear(pair, kinds) or self.changes_state(pair):
            return self._tail_op(j, pair, kinds)
        outs = self.outs(pair, Kind.SHARE, Kind.SAMPLE)
        if any(kind is Kind.SAMPLE for _, _, kind in outs):
            raise self.refuse(pair, "lays a value reduced over the whole batch out over its samples")
        self._refuse_random(pair)
        self.note_division(j, pair)
        return Level.PART, outs

    def _linear(self, pair: Pair, kinds: list[Kind]) -> bool:
        if pair.name not in LINEAR:
            return False
        shares = [kind is Kind.SHARE for kind in kinds]
        if pair.name in DIVISIONS:
            return not any(shares[1:])
        return pair.name not in PRODUCTS or sum(shares) == 1

    def _sample_op(self, j: int, pair: Pair, kinds: list[Kind]) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if pair.name in BATCH_NORMS:
            self._refuse_batch_norm(pair)
        if self.changes_state(pair):
            raise self.refuse(pair, "writes values of single samples into the job's state")
        pure = all(self.pure[self.full.views[a].storage] for a, _ in pair.refs)
        data = pure and pair.full.random is None and Kind.SAMPLE not in kinds
        outs = self.outs(pair, Kind.SHARE, Kind.DATA if data else Kind.SAMPLE)
        unscaled = [kind is Kind.SHARE for _, _, kind in outs]
        if data and outs and all(unscaled) and not self.changed(pair) and j not in self.forced:
            for view, _ in pair.refs:  # a number of the batch alone: worked out on all of it, beforehand
                self.chain(self.full.views[view].storage, j, pair.full.where)
            self.plan.counts |= {self.full.views[a].storage for a, _, _ in outs if not self.full.views[a].size}
            return Level.ONCE, [(a, b, Kind.SAME) for a, b, _ in outs]
        if any(unscaled):
            self._refuse_random(pair)
        if pair.name in NLL_FORWARD and pair.full.args[3] == MEAN:
            self.note_loss(j, pair)
        self.note_division(j, pair)
        return Level.PART, outs

    def _size_op(self, j: int, pair: Pair, kinds: list[Kind]) -> tuple[Level, list[tuple[int, int, Kind]]]:
        if self.changes_state(pair):
            return self._tail_op(j, pair, kinds)
        outs = self.outs(pair, Kind.SIZE, Kind.SAMPLE if pair.full.random is not None else Kind.DATA)
        if pair.full.random is not None and (pair.name == "randperm" or any(k is Kind.SIZE for _, _, k in outs)):
            raise self.refuse(pair, "draws numbers that depend on how many samples the batch has")
        self.note_division(j, pair)
        return Level.PART, outs

    def _refuse_random(self, pair: Pair) -> None:
        if pair.full.random is not None:
            raise self.refuse(pair, "draws random numbers over the whole batch")

    def _refuse_batch_norm(self, pair: Pair) -> None:
        """Instance norm comes as batch norm with the samples along dimension 1; that one splits."""
        a, b = pair.refs[0]
        if training(pair) and scaled(self.full.views[a], self.part.views[b], self.count) != 1:
            raise NotSplittable(
                f"{pair.full.where}: batch norm in training mode uses the mean and variance of the whole batch, "
                "and parts of it have others",
                "use layer, group or instance norm, or keep the batch norms in eval(), or submit without microbatches",
            )
