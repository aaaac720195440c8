"""A verifiers environment: sums of two digits, which an agent may try twice.

verifiers_agent.py beside it trains on it; `verifiers` finds taskset and harness by this module's
name.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import verifiers.v1 as vf
from loop import right_sum

__all__ = ["SumTaskset", "TwoTries"]


class SumData(vf.TaskData):
    """Two digits."""

    a: int
    b: int


class SumTask(vf.Task[SumData]):
    """A sum of two digits."""

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        """Returns how well the last answer fits."""
        return right_sum(trace.last_reply, task.a + task.b)


class SumTaskset(vf.Taskset[SumTask]):
    """All sums, in an order in which neighbours differ."""

    def load(self) -> Iterator[SumTask]:
        """Yields the tasks."""
        for number in range(100):
            a, b = number * 37 % 10, number * 37 // 10 % 10
            yield SumTask(SumData(a=a, b=b, prompt=f"What is {a} + {b}? One number."))


class TwoTries(vf.Harness[vf.HarnessConfig]):
    """An agent that says whether the answer is wrong, and asks once more.

    It runs in this process, and calls the model at verifiers' own address, which passes the calls
    on.
    """

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: SumData,
    ) -> vf.ProgramResult:
        """Solves a task."""
        messages: list = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                message = answer.choices[0].message
                if right_sum(message.content or "", data.a + data.b) == 1.0:
                    break
                messages += [message, {"role": "user", "content": "Wrong. Again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
