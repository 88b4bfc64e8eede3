"""What a high job may lose, and how choosy low work has to be about when it runs.

`max_slowdown` gives every step of a high job a credit: the seconds it may take longer. An *account*
collects credits and pays what low work was measured to cost; a launch whose expected cost it can't pay
has to wait. So the mean is held whatever the estimates are worth. A *tail limit* holds single steps: a
step loses at most twice the credit, scaled by a factor that falls when a step that should not have
exceeded it did, and recovers slowly: balanced at about one step in 180. Whatever the cause, steps over the limit are
paid from *tokens*, of which there is one in 170 steps: with some, what is not known may be tried; owing some, steps may
lose less. Steps that would lose as much without low work are not charged to it: of those beside low work as many tokens
are given back as they would cost, had each lost besides what a step may lose on average (baseline.py), and the mean is
over such steps' mean.

The *price* says how many low seconds one high second is worth waiting for. A low piece costs least
beside certain ranges; anywhere else it may run as long as what that costs more, at the price, is less
than the piece itself. It rises while launches have to wait for credit and falls while credit is left
over, so the credit goes where it buys most. A piece is never held by the price for what it can't avoid.
"""

from __future__ import annotations

from typing import Final

from gpumux.scheduler.guard.baseline import KEEP, Noise

# Of the credit is spent: the rest is for what the core does not see, a host that is busy with low work.
MARGIN: Final = 0.92
BANK: Final = 3.0  # credits an account holds at most
DEBT: Final = 8.0  # credits it can owe: after a disaster low work is held for so many steps, not for ever
TAIL: Final = 2.0  # credits one step may lose
TAIL_START: Final = 0.86
TAIL_FALL: Final = 0.9  # for a step over the limit
TAIL_RISE: Final = 1.0006  # for one that is not
TAIL_LEAST: Final = 0.3
TAIL_MOST: Final = 0.92
TAIL_RECOVER: Final = 1.01  # for each step without low work beyond so many
PATIENCE: Final = 16
NEAR: Final = 0.985  # of what it may lose: a step that loses more counts as over it
TOKENS: Final = 3.0  # steps over the limit that may be risked to find something out
MOST_OWED: Final = 100.0
LENT: Final = 0.5  # tokens that may be owed; beyond that no step may lose as much as it could
OWED: Final = 0.85  # of the limit, for each token owed beyond those
LEAST_OWED: Final = 0.5  # of the limit, however many they are
# credits lost beyond what an account can owe that cost a token: a token in 200 steps makes that 4 % of the credit
UNPAID: Final = 8.0
TOKEN_RATE: Final = 0.006  # for each step
PRICE_START: Final = 1.0
PRICE_RISE: Final = 1.05  # for a step in which low work waited for credit
PRICE_FALL: Final = 0.95  # for one that found the account full
PRICE_LEAST: Final = 0.01
PRICE_MOST: Final = 100.0
UNSEEN_S: Final = 20e-6  # the core takes for an event, during which a step may come
MOST_WAITED_S: Final = 200e-6  # one that lay unseen for longer did so for something else than low work's events
LEAST_SLOWDOWN: Final = 0.002  # what a job that allows none is still measured by


class Account:
    """One high job's. Seconds, but for `price` (low seconds for a high second) and factors."""

    __slots__ = (
        "balance", "beside", "credit", "dear", "doubts", "full", "learned", "limit", "noise", "price", "short", "slack", "tail",
        "tokens", "unseen", "unshared", "used",
    )  # fmt: skip

    def __init__(self, max_slowdown: float) -> None:
        self.limit = 0.0  # the most it may lose
        self.used = 0.0  # excess of the step that runs, so far
        self.balance = 0.0
        self.credit = 0.0  # of the step that runs
        self.price = PRICE_START
        self.tokens = TOKENS  # steps over the tail limit that may still be risked
        self.full = False  # the account could not hold the last step's credit
        self.short = False  # in this step low work waited for credit
        self.learned = False  # what is not known was tried for long enough: steps over the limit count from now on
        self.doubts = 1  # launches in a row, see Noise.doubts
        self.slack = max(max_slowdown - 1.0, LEAST_SLOWDOWN)
        # Of a second beside low work: what is lost of it at most if the mean is kept.
        self.dear = self.slack / (1.0 + self.slack)
        self.noise = Noise()
        self.beside = 0.0  # steps beside low work, the newest hundred
        self.tail = TAIL_START
        self.unseen = 0.0  # seconds that the next step may have to wait for the core
        self.unshared = 0  # steps since low work last ran beside one

    def begin(self, solo_step: float) -> None:
        """A step begins that takes `solo_step` seconds alone."""
        self.used = 0.0
        credit = self.slack * solo_step * MARGIN
        if credit != self.credit:  # all else that the limit depends on changes when a step ends
            self.credit = credit
            self._limit()

    @property
    def most(self) -> float:
        """Seconds a step may lose without counting as over the limit."""
        return NEAR * TAIL * self.credit / MARGIN

    def relieved(self) -> None:
        """What steps lost too much by won't happen again: they may lose as much as before."""
        if self.tail < TAIL_START:
            self.tail = TAIL_START
            self._limit()

    def learn_no_more(self) -> None:
        """From now on steps over the limit count."""
        self.learned, self.tokens = True, TOKENS
        self._limit()

    def _limit(self) -> None:
        """Kept, as it is asked for more often than it changes."""
        most, tail, owed = TAIL * self.credit / MARGIN, self.tail, -self.tokens - LENT
        if owed > 0.0 and self.learned:
            tail *= max(OWED**owed, LEAST_OWED)
        limit, most = tail * most, most - self.unseen
        if most < limit:
            limit = most
        self.limit = limit if limit > 0.0 else 0.0

    def refuses(
        self, cost: float, upper: float, avoidable: float, pending: float, gain: float, ahead: bool = False
    ) -> str:
        """Why a launch of `gain` low seconds that costs `cost`, `upper` at worst, of which `avoidable` would not
        be lost elsewhere, has to wait; "" if it has not. `ahead`: it is the next step that it will cost."""
        used = 0.0 if ahead else self.used + pending
        if used + upper > self.limit:
            return "tail"
        if gain < self.price * avoidable:
            return "price"
        if (
            cost > 0.0
            and used + cost > self.balance + (self.credit if not ahead else 2 * self.credit - self.used - pending)
            and not (self.full and used <= 0.0)
        ):
            return "budget"
        return ""

    def alone(self, excess: float) -> None:
        """A step without low work is about to end `excess` seconds late."""
        before = self.noise.toll
        self.noise.add(self._toll(excess + self.credit / MARGIN))
        self.doubts = self.noise.doubts()
        # What earlier steps beside low work were charged rests on it, too.
        self.tokens = max(-MOST_OWED, min(self.tokens + (self.noise.toll - before) * self.beside, TOKENS))

    def _toll(self, excess: float) -> float:
        """Tokens that a step costs which loses so much."""
        if excess <= self.most:
            return 0.0
        unpaid = excess - DEBT * self.credit
        return 1.0 + (unpaid / (UNPAID * self.credit) if unpaid > 0.0 and self.credit > 0.0 else 0.0)

    def end(
        self, excess: float, shared: bool, foreseen: bool, unseen: float, late: float = 0.0,
        waited: float = 0.0,
    ) -> None:  # fmt: skip
        """A step ended `excess` seconds late; `shared`: low work ran beside it, so that the loss is ours;
        `foreseen`: none of it was there to find out what it costs; `unseen`: seconds that one like it may wait for the
        core; `waited`: those for which it did; `late`: by how much such steps are late on average without low work."""
        self.unseen = unseen
        credit, tokens, tail, balance = self.credit, self.tokens, self.tail, self.balance
        owes, bank = DEBT * credit, BANK * credit
        if shared:
            excess += waited
            noise, toll = self.noise, self._toll(excess)
            excess -= late
            self.beside = self.beside * KEEP + 1.0
            if noise.toll:
                tokens += noise.toll
                tail = min(TAIL_MOST, tail * TAIL_FALL**-noise.over)
            if not toll:
                tail *= TAIL_RISE
                if tail > TAIL_MOST:
                    tail = TAIL_MOST
            else:
                tokens = max(tokens - toll, -MOST_OWED)
                if foreseen:
                    tail = max(TAIL_LEAST, tail * TAIL_FALL)
            balance -= -credit if excess < -credit else owes if excess > owes else excess
            self.unshared = 0
        else:
            self.unshared += 1
            balance -= waited
            if self.unshared > PATIENCE:  # a limit that lets nothing through would never learn that it is too low
                tail = min(TAIL_MOST, tail * TAIL_RECOVER)
        tokens += TOKEN_RATE
        self.tokens, self.tail = tokens if tokens < TOKENS else TOKENS, tail
        balance += credit
        self.full = balance >= bank
        self.balance = -owes if balance < -owes else bank if balance > bank else balance
        self.used = 0.0
        if self.short:
            self.price = min(self.price * PRICE_RISE, PRICE_MOST)
        elif self.full:
            self.price = max(self.price * PRICE_FALL, PRICE_LEAST)
        self.short = False
        self._limit()
