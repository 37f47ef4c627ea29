"""What hypothesis may do with a simulated scheduler, whatever requests it is given."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from jaxpaged.core.request import Request
from tests.core.harness import Sim


class SimMachine(RuleBasedStateMachine):
    """Steps, endings and failures in any order. A subclass makes `sim`, adds requests to it, and
    says which of them are `alive`.
    """

    sim: Sim

    @property
    def alive(self) -> list[Request]:
        raise NotImplementedError

    @rule()
    def launch(self) -> None:
        if len(self.sim.queue) < 3:
            self.sim.launch()

    @precondition(lambda self: self.sim.queue)
    @rule()
    def read(self) -> None:
        self.sim.read()

    @rule(turns=st.integers(1, 10))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.sim.turn()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "error"]))
    def finish(self, data: st.DataObject, reason: str) -> None:
        self.sim.scheduler.finish(data.draw(st.sampled_from(self.alive)), reason)
        self.sim.scheduler.check_integrity()

    @precondition(lambda self: self.sim.queue)
    @rule()
    def fail(self) -> None:
        self.sim.fail()

    @rule(force=st.booleans())
    def reset(self, *, force: bool) -> None:
        pool = self.sim.scheduler.kv.pool
        idle = pool.num_held == 0
        done = self.sim.scheduler.reset_prefix_cache(preempt_running=force)
        assert done == (force or idle)
        assert not done or pool.num_cached == 0
        self.sim.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.run(limit=5000)
            self.sim.assert_outputs(allow_failed=True)
            for request in self.sim.scheduler.take_failed():
                assert request.error is not None
                assert "has grown to" in request.error
