"""Faults of arrival: what is lost on the way, and what is believed to be there when it is not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.accuracy.fault import ArrivesWrong, Fault, Job, Recording, Shape, Transfer, World


class CompletionEarly(Fault):
    code = "F09"
    with_ranks = True
    stages = ("completion",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        self.victim.steps = max(2, self.victim.steps)
        return super().arrange(shape, recording, crowd)

    def drains(self, world: World, job: Job, chunk: tuple[int, int]) -> bool:
        return super().drains(world, job, chunk) and not (job is self.victim and chunk[1] == job.rows)

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        if job is not self.victim or not pending:
            yield from super().complete(world, job, pending)
            return
        while len(pending) > 1 and self.rng.random() < 0.5:
            first = pending.pop(0)
            world.land(first)
            world.done(first)
        halves = [(transfer, sum(n for _, _, n in transfer.parts)) for transfer in pending]
        cuts = [self.rng.randrange(total) if number == 0 else 0 for number, (_, total) in enumerate(halves)]
        for (transfer, _), cut in zip(halves, cuts, strict=True):
            world.land(transfer, last=cut)
        world.tell(job)
        world.arrive(job)
        yield
        self.check(world, job)
        world.read(job, looks=True)
        yield
        for (transfer, _), cut in zip(halves, cuts, strict=True):
            world.land(transfer, first=cut)
            world.done(transfer)
        pending.clear()
        yield


class ComponentLate(Fault):
    code = "F12"
    stages = ("completion",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.components = ("index_k", "compressed_kv")
        shape.layers = min(2, shape.layers)
        self.late = self.rng.choice(shape.components)
        self.victim.steps = max(2, self.victim.steps)
        return super().arrange(shape, recording, crowd)

    def drains(self, world: World, job: Job, chunk: tuple[int, int]) -> bool:
        return super().drains(world, job, chunk) and job is not self.victim

    def complete(self, world: World, job: Job, pending: list[Transfer]) -> Iterator[None]:
        if job is not self.victim:
            yield from super().complete(world, job, pending)
            return
        late = [t for t in pending if self._of(world, t)]
        yield from world.drain([t for t in pending if t not in late])
        world.tell(job)
        world.arrive(job)
        yield
        self.check(world, job)
        world.read(job, looks=True)
        yield
        yield from world.drain(late)
        pending.clear()

    def _of(self, world: World, transfer: Transfer) -> bool:
        source = transfer.parts[0][0]
        found = next((unit for unit, *_ in transfer.side._parts(source, 1)), None)
        return found is not None and found[0] == self.late


class FailedTransferUsed(ArrivesWrong):
    code = "F13"
    with_ranks = True
    stages = ("wire",)

    def state(self, world: World, transfer: Transfer) -> str:
        return "error" if transfer.job is self.victim else "done"

    def land(self, world: World, transfer: Transfer) -> None:
        if transfer.job is not self.victim:
            super().land(world, transfer)
            return
        total = sum(n for _, _, n in transfer.parts)
        world.land(transfer, last=self.rng.choice([0, 0, self.rng.randrange(total)]))


class MetadataMixUp(Fault):
    code = "F28"
    stages = ("completion",)

    def arrange(self, shape: Shape, recording: Recording, crowd: list[Job]) -> list[Job]:
        shape.metadata = True
        return super().arrange(shape, recording, crowd)

    def metadata(self, world: World, job: Job) -> int:
        others = [other.room for other in world.jobs if other.room != job.room and not other.mark]
        if job is not self.victim or not others:
            return job.room
        self.struck(job)
        return self.rng.choice(others)


class LostOnWire(ArrivesWrong):
    code = "F31"
    with_ranks = True
    stages = ("wire",)

    def land(self, world: World, transfer: Transfer) -> None:
        if transfer.job is not self.victim:
            super().land(world, transfer)
            return
        total = sum(n for _, _, n in transfer.parts)
        first = self.rng.randrange(total)
        last = min(total, first + self.rng.choice([64, 4096, total // 3 + 1]))
        world.land(transfer, last=first)
        world.land(transfer, first=last)
        if self.rng.random() < 0.4:  # altered, not lost
            at = 0
            for _, destination, length in transfer.parts:
                low, high = max(first, at), min(at + length, last)
                if low < high:
                    noise = np.frombuffer(self.rng.randbytes(high - low), np.uint8)
                    world.decode.write_bytes(destination + low - at, noise)
                at += length
