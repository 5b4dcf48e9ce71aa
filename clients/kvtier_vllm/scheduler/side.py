"""The scheduler's side: it looks up, submits loads and stores, and tells the workers which parts to follow.

Whatever happens, every load that was promised to vLLM reaches the workers in the next metadata, so that its
request is reported and continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtier import Client
from kvtier.status import ClientState
from kvtier_engine.link import Link

from kvtier_vllm import meta
from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.groups import Groups
from kvtier_vllm.hooks import block_table
from kvtier_vllm.model.adapter_loads import AdapterLoad, adapter_of
from kvtier_vllm.model.adapters import Adapters
from kvtier_vllm.model.namespace import UnsupportedConfiguration
from kvtier_vllm.scheduler.ahead import Ahead
from kvtier_vllm.scheduler.auditing import Audits, AuditVerdict
from kvtier_vllm.scheduler.control import Control, Controls
from kvtier_vllm.scheduler.generations import Generations
from kvtier_vllm.scheduler.holding import BlockHolds, WholeBlockPool
from kvtier_vllm.scheduler.leaving import Leaving
from kvtier_vllm.scheduler.loading import Loader, PromisedLoad
from kvtier_vllm.scheduler.matching import Matcher
from kvtier_vllm.scheduler.prefill import PrefillMeter, tokens_of_step
from kvtier_vllm.scheduler.question import Question
from kvtier_vllm.scheduler.room import LoadRoom
from kvtier_vllm.scheduler.storing import Made, Storer
from kvtier_vllm.scheduler.tables import beyond, hashes_of, newly_allocated, targets_of
from kvtier_vllm.scheduler.tracking import LoadCounters, TrackedRequest
from kvtier_vllm.scheduler.worth import Worth

if TYPE_CHECKING:
    from kvtier_vllm.scheduler.events import BlockEvents

BLOCKS_LOADED_MAX = 65_536
"""The most blocks of one request that are loaded, as many as the daemon takes in one lookup by default. The
rest is computed."""
LOOKUPS_WITHOUT_HIT = 100
"""After as many lookups without a hit, the log says once what this engine's namespace is."""
CLOSE_TIMEOUT_S = 1.0
SETTLE_S = 0.1
"""How long a reset of the engine's own cache waits for stores that still read blocks of finished requests.
Their copies take milliseconds."""
PREFILL_TOKENS_PER_S_MAX = 1e9
"""The highest rate that is reported."""

Connect = Callable[[meta.Weights], Link]
"""Makes the client's link, for blocks of these weights."""


class SchedulerSide:
    """The connector's part in vLLM's scheduler. Called from one thread; waits no longer than the lookup
    budget."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Groups,
        connect: Connect,
        log: logging.Logger,
        prefill: PrefillMeter | None = None,
        events: BlockEvents | None = None,
        *,
        audits: Audits | None = None,
        in_parts: bool = True,
        weights: meta.Weights = meta.AS_STARTED,
        world_size: int = 1,
        adapters_by_name: bool = False,
    ) -> None:
        """Attaches in the background.

        prefill: learns how fast prompts are computed; None if that was configured.
        events: None if nobody wants to be told what is held.
        audits: None for no audits.
        in_parts: whether a prefix that cannot be leased at once is promised as a whole. If some of it cannot
            be loaded in the end, vLLM computes it.
        adapters_by_name: whether vLLM's block hashes carry nothing of adapters but their names.
        """
        self._config = config
        self._groups = groups
        smallest = min(groups.shapes, key=lambda shape: shape.block_tokens)
        self._longest = next((shape for shape in groups.shapes if not shape.window_blocks), smallest)
        """The group that knows how long a prefix is."""
        self._loaded_max = max(1, BLOCKS_LOADED_MAX * smallest.block_tokens // groups.unit_tokens)
        """The most units of one request that are loaded."""
        self._connect = connect
        self._log = log
        self._generations = Generations(
            weights, keep=config.on_reset == "keep", world_size=world_size, log=log
        )
        self.link = connect(weights)
        """The client in use."""
        question = Question(groups)
        self._matcher = Matcher(
            question,
            config.lookup_budget_ms / 1e3,
            config.pending_wait_s,
            config.pending_poll_s,
            in_parts=in_parts,
            block_s=lambda: self._worth.token_s * groups.unit_tokens if self._judges else 0.0,
            step_s=lambda: self._worth.step_s if self._judges and self._busy else 0.0,
        )
        self._prefill = prefill
        self._events = events
        self._storer = Storer(
            groups, threshold=config.store_threshold, events=events, holds_at_once=groups.zeroed
        )
        self._controls = Controls(config, log)
        self._leaving = Leaving(groups, self._longest)
        self._adapters = Adapters(log, world_size=world_size, names_alone=adapters_by_name)
        if events is not None:
            events.keys_of = self._adapters.known_keys
        self._worth = Worth(lambda: config.prefill_tokens_per_s if prefill is None else prefill.tokens_per_s)
        self._computed: Collection[str] = ()
        """The requests that the last step has computed."""
        self._judges = not config.min_load_tokens
        """Whether it is judged what is loaded sooner than computed, and not set."""
        self._busy = False
        """Whether a load in this step shares its steps with requests that are being computed."""
        self._least: int | None = None
        """The fewest units that are loaded; None: to be found out for this step."""
        self._step_client_known = False
        """Whether it was found out in this step which client is asked about requests."""
        self._step_client: Client | None = None
        """That client; None if none is ready."""
        self._loads = LoadCounters()
        self._loader = Loader(groups, log, config.pending_wait_s)
        self._room = LoadRoom(groups)
        self._filled = [shape for shape in groups.shapes if not shape.handed_off]
        """The groups whose blocks are stored when they are full. vLLM hands off those of the others."""
        self._audits = audits
        self._quarantined = False
        """Whether an audit has found that this namespace holds other blocks than this engine computes."""
        self._tainted: set[str] = set()
        """Requests from before that, which may have loaded some of it. What they go on to compute is no
        better, and must not stay in the engine's own cache."""
        self._pool: WholeBlockPool | None = None
        self._requests: dict[str, TrackedRequest] = {}
        self._loading: dict[str, PromisedLoad] = {}
        """What is being loaded for those requests, and was not reported."""
        self._aborted: dict[str, list[int]] = {}
        """The blocks that vLLM keeps for requests that were over before their loads were reported."""
        self._lent: list[int] = []
        """Those of them that count as free while the engine's own cache is reset."""
        self._ahead = Ahead(question, self._prefetchable)
        self._epoch: int | None = None
        self._step = 1
        self._work = 0
        """The number of steps so far that compute or load anything."""
        self._out = meta.Orders()
        """What the workers are told in the next step."""
        self._stopped = False
        self._told = False

    def watch_blocks(self, pool: WholeBlockPool) -> None:
        """Takes the engine's block pool. From now on stores hold what they read, where that is needed."""
        self._room.watch(pool)
        self._pool = pool
        if self._audits is not None:
            self._audits.watch(pool)
        self._storer.holds = BlockHolds(pool, self._config.load_start_deadline_s, time.monotonic)

    def settle(self) -> None:
        """Frees what stands in the way of a reset of the engine's own cache, which vLLM refuses while any
        block is used. That includes what is being loaded for requests that are over, of which an engine that
        takes no further step would never hear. Waits at most `SETTLE_S`. `was_reset` follows."""
        if self._pool is not None and self._aborted:
            self._lent = [block for blocks in self._aborted.values() for block in blocks]
            self._pool.free_blocks([self._pool.blocks[block] for block in self._lent])
        timeout_s = 0.0 if self._stopped else SETTLE_S
        if self._audits is not None:
            self._audits.settle(timeout_s)
        self._out.fence += self._storer.settle(timeout_s)

    @property
    def frees_soon(self) -> bool:
        """Whether blocks that only stores of finished requests keep from others are about to come back."""
        holds = self._storer.holds
        return holds is not None and not self._stopped and holds.come_back_soon

    @property
    def storing(self) -> bool:
        """Whether a step would store what it computes: stores pause for a moment after one was refused."""
        return self._ready_client() is not None and self._storer.has_room

    @property
    def has_steps_to_do(self) -> bool:
        """Whether the engine has to make further steps even without requests, to get its blocks back, or
        because the daemon has to be told something when stores have ended."""
        if self._storer.holds or self._audits:
            return True
        return len(self._leaving) > 0 and not self._stopped

    # --- what vLLM asks

    def arrived(self, request: Any) -> None:
        """Takes note of a new request, which vLLM asks about when it is its turn."""
        keys = self._adapters.keys(request)
        control = self._controls.of(request)
        if keys is not None and control.load and not control.keeping.host_only:
            self._ahead.arrived(request, keys(request.block_hashes))
            if control.prefetch and (client := self._ready_client()) is not None:
                self._ahead.prefetch_now(client, request.request_id)

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """Returns how many tokens can be loaded beyond the engine's own, or None to be asked again."""
        tracked = self._requests.get(request.request_id) or self._track(request)
        tracked.expected_tokens, tracked.begun = num_computed_tokens, False
        if not self._step_client_known:
            self._step_client_known, self._step_client = True, self._ready_client()
        least = self._least or self._least_units()
        client, asked = self._step_client, (num_computed_tokens, request.num_tokens, least)
        if asked == tracked.settled and client is not None:
            promised = tracked.promised_tokens
            if promised:
                if self._matcher.holds(request.request_id):
                    return promised if self._room.has(request, num_computed_tokens + promised) else None
            elif self._matcher.misses(client, request.request_id):
                return 0
        tracked.settled = None
        self._ahead.asked(request.request_id)
        if client is None or not tracked.control.load or not tracked.may_load:
            self._matcher.drop(request.request_id)
            return 0
        unit_tokens = self._groups.unit_tokens
        local, rest = divmod(num_computed_tokens, unit_tokens)
        if rest:
            return 0
        tracked.matched_at = local
        hashes = self._hashes(tracked)
        total = min(self._loadable(request, hashes, tracked.control), local + self._loaded_max)
        if tracked.audited_unit is not None:
            total = min(total, tracked.audited_unit)
        proof = int(self._groups.looks_ahead)  # a unit that must be found, and is computed all the same
        units = self._matcher.match(
            client,
            request.request_id,
            hashes,
            local,
            min(total + proof, len(hashes) // self._groups.unit_hashes),
            least + proof,
            host_only=tracked.control.keeping.host_only,
        )
        if units:
            units -= proof
        if units and self._audits is not None and not tracked.audit_drawn:
            tracked.audit_drawn = True
            if self._audits.choose(request.request_id, units):
                units -= 1
                tracked.audited_unit = local + units
                if not self._groups.plain:  # a shorter prefix needs other leases, from another lookup
                    self._matcher.drop(request.request_id)
                    return None
        if units is None:
            return None
        tracked.promised_tokens = promised = units * unit_tokens
        tracked.settled = asked
        if not units:
            return 0
        return promised if self._room.has(request, num_computed_tokens + promised) else None

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Submits the load of what `match` promised, for which vLLM has made room; with 0 tokens vLLM goes on
        without. `tables` are the request's blocks, by group."""
        tracked = self._track(request)
        grant = self._matcher.take(request.request_id)
        if num_external_tokens == 0:
            if grant is not None:
                grant.lookup.release()
            if tracked.audited_unit is not None:  # it loads nothing; otherwise it has loaded, and runs
                self._compute_unaudited(tracked)
            if self._storer.watches:  # another connector may load there, which no step tells
                new = beyond(self._groups, tables, tracked.expected_tokens)
                self._out.fence += self._storer.withdraw(new)
            return
        tracked.may_load = False
        begin = tracked.matched_at * self._groups.unit_tokens
        tracked.expected_tokens = begin + num_external_tokens
        self._room.take(request, begin + num_external_tokens)
        targets = targets_of(self._groups, tables, begin, begin + num_external_tokens)
        load, order = self._loader.begin(
            self.link.client,
            request.request_id,
            grant,
            targets,
            tracked.hashes,
            num_external_tokens,
            self._step,
            host_only=tracked.control.keeping.host_only,
        )
        self._loading[request.request_id] = load
        self._out.loads.append(order)
        if self._audits is not None and tracked.audited_unit is not None:
            self._audits.begin(request.request_id, tracked.hashes, tracked.audited_unit)
            tracked.audited_unit = None
        if self._storer.watches:
            self._out.fence += self._storer.withdraw(load.block_ids)

    def promise_failed(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """Has a load into these blocks reported as failed that was promised to vLLM and could not be
        submitted."""
        if not any(order.request == request_id for order in self._out.loads):
            ids = tuple(tuple(block for block in table if block) for table in tables)
            self._out.loads.append(
                meta.LoadOrder(request_id, (None,) * len(ids), ids, blocks_tell=len(ids) == 1)
            )

    def plan_step(self, output: Any) -> None:
        """Submits the stores of the blocks that are full after this step, and takes in what has ended."""
        # Most steps have next to nothing to do here. Each function that is called costs microseconds between
        # two runs of a model, which leaves the processor's caches to others. So ask before calling.
        scheduled_tokens: Mapping[str, int] = output.num_scheduled_tokens
        storer = self._storer
        self._work += bool(scheduled_tokens or self._out.loads)
        if storer.holds:
            overdue = storer.overdue(self._step, everything=self._stopped or self._unanswered)
            self._out.fence += overdue
        self._room.give_back(scheduled_tokens)
        if storer.busy or self._audits:
            for tracked in self._requests.values():
                if tracked.preemptions != tracked.request.num_preemptions:
                    self._forget_preempted(tracked)
        if self._tainted:
            self._evict_all()
        if storer.watches:
            self._out.fence += storer.withdraw(newly_allocated(self._groups, output))
        if self._stopped:
            if self._audits is not None:
                self._audits.drop_all()
            return
        if self._groups.zeroed and storer.holds is None:
            raise UnsupportedConfiguration(
                "this vLLM zeroes blocks that it takes from a request (layers are recurrent or differ in "
                "precision), and lets connectors hold none: use vLLM 0.32"
            )
        client = self._ready_client()
        if storer.busy:
            self._out.revoke += storer.poll()
        if self._leaving:
            self._leaving.tell(client)
        if self._loading:
            self._go_on_loading(client)
        self._worth.step(bool(scheduled_tokens))
        self._computed = scheduled_tokens.keys()
        if self._prefill is not None:
            self._measure(self._prefill, output)
        if client is not None:
            if self._ahead:
                self._ahead.prefetch(client)
            if self._events is not None:
                self._events.check(client)
        storing = client if self._config.store else None
        for request_id, scheduled in scheduled_tokens.items():
            tracked_or_none = self._requests.get(request_id)
            if tracked_or_none is None:
                continue
            if tracked_or_none.preemptions != tracked_or_none.request.num_preemptions:
                self._forget_preempted(tracked_or_none)
            if storing is None or not tracked_or_none.control.store:
                continue
            if self._has_full_blocks(tracked_or_none, scheduled):
                self._store_full_blocks(storing, tracked_or_none, scheduled, output)
        if storing is not None and len(self._filled) < len(self._groups.shapes):
            self._store_states(output)
        if storing is not None and storer.planned:
            self._out.stores += storer.submit(storing, self._step)
        if client is not None and storer.unsent_blocks:
            storer.send(client, self._step)
        if self._audits is not None and self._audits.has_orders:
            self._audits.plan(client, output, self._requests, self._step, self._out)
        if not self._told:
            self._tell_why_nothing_hits(client)

    def take_metadata(self) -> meta.KvtierMetadata:
        """Returns what the workers are to know in this step, and begins the next one. Never fails."""
        orders = self._out
        out = meta.KvtierMetadata(self._step, self._work, self._generations.weights, stopped=self._stopped)
        if orders.any:
            out.orders, self._out = orders, meta.Orders()
        self._step += 1
        self._least, self._step_client_known = None, False
        self._matcher.next_step()
        return out

    def results(self, output: Any) -> None:
        """Takes what the workers reported for a step."""
        invalid = output.invalid_block_ids or ()
        if invalid:
            for load in self._loading.values():
                if not load.block_ids.isdisjoint(invalid):
                    load.failed = True
        for request_id in getattr(output, "failed_recving", None) or ():
            if (failed := self._loading.get(request_id)) is not None:
                failed.failed = True
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, meta.WorkerReport):
            self._heed(report)
        for request_id in output.finished_recving or ():
            self._aborted.pop(request_id, None)
            if request_id not in self._loading:
                continue
            load = self._loading.pop(request_id)
            tracked = self._requests[request_id]
            if load.rest is not None:  # the workers were stopped
                load.rest.drop()
                load.failed = True
            self._loads.loads += 1
            self._loads.failed += load.failed
            seconds = time.monotonic() - load.submitted_s
            self._loads.seconds += seconds
            if not load.failed:
                self._worth.loaded(load.tokens, seconds)
                self._loads.tokens += load.tokens
                tracked.may_load = True
                for target, hashes in load.loaded:
                    indexes = range(target.first, target.first + len(hashes))
                    self._storer.loaded(tracked.request, target.group, indexes, hashes)

    def totals(self) -> dict[str, float]:
        """Returns the totals since the engine started, by the names of `stats.COUNTERS`."""
        matched, stored, loaded = self._matcher.counters, self._storer.counters, self._loads
        return {
            "lookups": matched.lookups + matched.polls,
            "lookups_hit": matched.hits,
            "lookups_unanswered": matched.given_up,
            "requests_known_absent": matched.local,
            "computed_instead": matched.left,
            "waits": matched.waits,
            "waits_in_vain": matched.waits_in_vain,
            "loads": loaded.loads,
            "loads_failed": loaded.failed,
            "loaded_tokens": loaded.tokens,
            "load_seconds": loaded.seconds,
            "stores": stored.transfers,
            "stores_refused": stored.refused,
            "stored_blocks": stored.blocks,
            **{f"hints_{verdict}": count for verdict, count in self._controls.answered.items()},
            "audits": 0 if self._audits is None else self._audits.counters.audits,
            "audit_mismatches": 0 if self._audits is None else self._audits.counters.mismatches,
        }

    def take_events(self) -> list[Any]:
        """Returns vLLM's KV events about what has changed in what this engine knows kvtierd to hold."""
        return [] if self._events is None else self._events.take()

    def finished(self, request_id: str, tables: Sequence[Sequence[int]] = ()) -> bool:
        """Ends a request that is over. `tables` are its blocks, by group. Returns whether vLLM must keep them
        until the workers report the request as sent."""
        self._matcher.forget(request_id)
        self._ahead.asked(request_id)
        self._room.give_back((request_id,))
        if self._audits is not None:
            self._audits.over(request_id)
        self._least = None
        if request_id in self._tainted:
            self._evict_all()
            self._tainted.discard(request_id)
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return False
        load = self._loading.pop(request_id, None)
        if load is not None:
            # vLLM keeps the blocks until the load is reported as finished.
            self._out.revoke += load.parts
            self._load_no_further(request_id, load)
            self._aborted[request_id] = [block for table in tables for block in table if block]
            return False
        self._out.revoke += self._storer.poll()
        client = self._ready_client()
        if client is not None:
            self._leaving.over(client, tracked)
            if tracked.stores.open:  # the sooner they end, the sooner others can have its blocks
                client.flush()
        if tracked.preemptions != tracked.request.num_preemptions:
            self._out.fence += self._storer.forget_open(tracked.stores)
        if self._storer.keep(tracked.stores):
            return False
        self._out.held.append(request_id)
        return True

    def answers(self, request: Any) -> dict[str, Any] | None:
        """Returns what the client is told of a request that is over: what became of its KV hints. None if it
        came with none."""
        return self._controls.answers(request)

    def was_reset(self, done: bool) -> None:
        """Takes note that vLLM was asked to reset its own prefix cache, and whether it has done so."""
        if self._pool is not None and self._lent:  # a load may still write to them
            self._pool.touch([self._pool.blocks[block] for block in self._lent])
            self._lent = []
        if self._stopped:
            return
        if self._generations.was_reset(self._work, done=done):
            self._begin()

    def reset(self) -> None:
        """Takes note that what is stored may no longer fit what this engine computes."""
        if self._generations.was_dropped(self._work):
            self._begin()

    def weights_changed(self, changes: Sequence[meta.WeightsChange]) -> None:
        """Takes what workers have told about their weights."""
        if self._generations.have_changed(self._work, changes):
            self._begin()

    def adapters_loaded(self, loads: Sequence[AdapterLoad], *, at_once: bool = False) -> None:
        """Takes which adapters workers have loaded (see `Adapters.loaded`). Requests whose adapter has other
        weights now store nothing any more."""
        ended = self._adapters.loaded(loads, at_once=at_once)
        for tracked in self._requests.values() if ended else ():
            if adapter_of(tracked.request) in ended:
                tracked.keys = tracked.settled = None

    def _begin(self) -> None:
        """Begins with other weights: nothing that was stored so far is this engine's, and nothing that is
        being loaded counts."""
        self._matcher.drop_all()
        self._start_over()
        self._fail_loads()
        self.link.close(CLOSE_TIMEOUT_S)
        self._quarantined = False
        if not self._stopped:
            self.link = self._connect(self._generations.weights)

    def stop(self) -> None:
        """Disables this side for good; `take_metadata` and `finished` still work."""
        self._stopped, self._step_client_known = True, False
        self.link.close(0)
        if self._events is not None:
            self._events.clear()

    def close(self) -> None:
        """Ends the connection, because the engine shuts down."""
        self._stopped, self._step_client_known = True, False
        self._adapters.close()
        self.link.close(CLOSE_TIMEOUT_S)

    # --- inside

    def _track(self, request: Any) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            control = self._controls.of(request)
            stores = self._storer.new_state(request)
            stores.kept = control.keeping.kept
            cool_from = control.keeping.cool_from_tokens
            stores.made = None if cool_from is None else Made(self._groups.shapes, cool_from)
            tracked = TrackedRequest(
                request,
                control,
                stores,
                self._adapters.keys(request),
                preemptions=request.num_preemptions,
            )
            self._requests[request.request_id] = tracked
        return tracked

    def _hashes(self, tracked: TrackedRequest) -> Sequence[bytes]:
        """Returns `TrackedRequest.hashes`, and asks for the keys while they are not known."""
        if tracked.keys is None:
            tracked.keys = self._adapters.keys(tracked.request)
        return tracked.hashes

    def _ready_client(self) -> Client | None:
        client = self.link.client
        if client is None or self._stopped or self._quarantined:
            return None
        epoch = client.ready_epoch
        if epoch is None:
            return None
        if epoch != self._epoch:
            self._epoch = epoch
            self._start_over()
        return client

    @property
    def _unanswered(self) -> bool:
        """Whether stores wait for a daemon that does not answer."""
        client = self.link.client if self._storer.holds else None
        return client is not None and client.status.state is ClientState.UNRESPONSIVE

    def _start_over(self) -> None:
        self._step_client_known = False
        self._matcher.drop_all()
        self._storer.start_over()
        self._leaving.clear()
        if self._audits is not None:
            self._audits.drop_all()
            self._audits.attached()
        if self._events is not None:
            self._events.clear()
        for request_id, load in self._loading.items():
            self._load_no_further(request_id, load)
        for tracked in self._requests.values():
            tracked.stores.next_block = [0] * len(self._groups.shapes)
            tracked.stores.failures = 0

    def _compute_unaudited(self, tracked: TrackedRequest) -> None:
        """Ends the request's audit: what it computes for one is not compared."""
        tracked.audited_unit = None
        if self._audits is not None:
            self._audits.over(tracked.request.request_id)

    def _heed(self, report: meta.WorkerReport) -> None:
        verdict = None if self._audits is None else self._audits.results(self.link.client, report.audits)
        if report.adapters:
            self.adapters_loaded(report.adapters)
        if report.weights:
            self.weights_changed(report.weights)
        elif verdict is not None and not self._quarantined:
            self._quarantine(verdict)

    def _quarantine(self, verdict: AuditVerdict) -> None:
        """Leaves the namespace: what is stored under this engine's name is not what it computes."""
        client = self.link.client
        self._log.error(
            "kvtier: an audit found that block %s is stored otherwise than this engine computes it: relative "
            "error %.3g in %s, where %.2g is the most that rounding explains. This engine loads and stores "
            "nothing more in namespace %s, and requests that have loaded from it may be wrong. Either some "
            "engine's weights were changed without telling kvtier, or engines share that differ in something "
            "that decides their KV cache: `kvtierctl namespaces --fields` shows what they have said; "
            "give this engine another weights_revision, or clear the namespace, and report it",
            verdict.block_hash.hex()[:16],
            verdict.error,
            verdict.detail,
            verdict.threshold,
            "" if client is None else client.status.namespace_digest[:16],
        )
        self._quarantined = True
        self._epoch = None
        self._start_over()
        self._fail_loads()
        self._tainted = set(self._requests)
        self._evict_all()

    def _evict_all(self) -> None:
        """Empties the engine's own prefix cache, as a reset does: what was loaded is in it like what was
        computed. Requests that run keep their blocks."""
        if self._pool is not None:
            self._pool.evict_blocks(set(range(len(self._pool.blocks))))

    def _fail_loads(self) -> None:
        """Has all loads fail, because what they bring is not what this engine computes."""
        for request_id, load in self._loading.items():
            load.failed = True
            self._out.revoke += load.parts
            self._out.distrusted.append(request_id)

    def _go_on_loading(self, client: Client | None) -> None:
        """Takes in loads that the daemon refused after they were submitted, which no worker will ever start,
        and begins the next parts of others."""
        for request_id, load in self._loading.items():
            if not load.failed and load.spoiled:
                load.failed = True
                self._out.revoke += load.parts
            order = self._loader.go_on(client, request_id, load, self._step)
            if order is not None:
                self._out.loads.append(order)

    def _load_no_further(self, request_id: str, load: PromisedLoad) -> None:
        """Has the rest of a load fail that is not submitted."""
        order = self._loader.give_up(request_id, load)
        if order is not None:
            self._out.loads.append(order)

    def _forget_preempted(self, tracked: TrackedRequest) -> None:
        tracked.preemptions = tracked.request.num_preemptions
        self._compute_unaudited(tracked)
        self._out.fence += self._storer.forget_open(tracked.stores)

    def _has_full_blocks(self, tracked: TrackedRequest, scheduled: int) -> bool:
        """Returns whether this step, which computes so many tokens, leaves more to store. Asked once per
        step."""
        request, first = tracked.request, tracked.stores.next_block
        if not tracked.begun:
            tracked.begun, began_at = True, request.num_computed_tokens
            tracked.foreign_until = began_at if began_at > tracked.expected_tokens else 0
        computed = request.num_computed_tokens + scheduled
        for shape in self._filled:
            if computed // shape.block_tokens > first[shape.group]:
                break
        else:
            return False
        return True

    def _store_full_blocks(
        self, client: Client, tracked: TrackedRequest, scheduled: int, output: Any
    ) -> None:
        request, table = tracked.request, None
        computed = request.num_computed_tokens + scheduled
        hashes = self._hashes(tracked)
        known = len(hashes)
        if tracked.foreign_until:  # stores only what vLLM has seen succeed
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            if computed <= tracked.foreign_until:  # the step that loads it has not ended, or the load failed
                computed = min(computed, tracked.expected_tokens)
        if (end_tokens := tracked.control.store_end_tokens) is not None:
            computed = min(computed, end_tokens)
        if longest := client.prefix_tokens_max:
            computed = min(computed, longest)
        for shape in self._filled:
            full = min(computed // shape.block_tokens, known // shape.hash_stride)
            if full <= tracked.stores.next_block[shape.group]:
                continue
            if not self._storer.has_room:
                return
            if table is None:
                table = block_table(output, request.request_id)
                if table is None:
                    return
            blocks = table[shape.group][:full]
            if len(blocks) < full or (not shape.window_blocks and 0 in blocks):
                continue
            self._storer.plan(
                client,
                request.request_id,
                tracked.stores,
                hashes_of(shape, hashes),
                blocks,
                shape.group,
            )

    def _store_states(self, output: Any) -> None:
        """Stores states of recurrent layers at block ends, which vLLM hands off as it computes them."""
        handed_off = getattr(output.kv_connector_block_state, "boundary_state_offloads", None) or {}
        for request_id, states in handed_off.items():
            tracked = self._requests.get(request_id)
            if tracked is None or not tracked.control.store:
                continue
            hashes, end_tokens = self._hashes(tracked), tracked.control.store_end_tokens
            for group, block_id, tokens in states:
                shape = self._groups.shapes[group]
                blocks, rest = divmod(tokens, shape.block_tokens)
                if end_tokens is not None and tokens > end_tokens:
                    continue
                if rest or blocks * shape.hash_stride > len(hashes) or not self._storer.has_room:
                    continue
                self._storer.plan_one(
                    request_id,
                    tracked.stores,
                    group,
                    hashes[blocks * shape.hash_stride - 1],
                    blocks - 1,
                    block_id,
                )

    def _least_units(self) -> int:
        """Returns the fewest units that are loaded in this step, by the setting, or else by what is computed
        sooner. The latter is judged only if a load shares its steps with requests that are being computed."""
        if self._least is None:
            tokens = self._config.min_load_tokens or 1
            self._busy = not self._requests.keys().isdisjoint(self._computed)
            if not self._busy:
                self._matcher.nothing_runs()
            elif self._judges:
                tokens = self._worth.least_tokens()
            self._least = max(1, -(-tokens // self._groups.unit_tokens))
        return self._least

    def _loadable(self, request: Any, hashes: Sequence[bytes], control: Control) -> int:
        """Returns how many units a load may fill. The last token is always computed, and never into a loaded
        block, as with the engine's own hits."""
        tokens: int = request.num_tokens - 1
        if control.load_end_tokens is not None:
            tokens = min(tokens, control.load_end_tokens)
        return min(tokens // self._groups.unit_tokens, len(hashes) // self._groups.unit_hashes)

    def _prefetchable(self, request: Any, hashes: Sequence[bytes]) -> int:
        return min(self._loadable(request, hashes, self._controls.of(request)), self._loaded_max)

    def _measure(self, prefill: PrefillMeter, output: Any) -> None:
        """Tells the daemon how fast this engine computes prompts."""
        client, tokens = self.link.client, (0, output.total_num_scheduled_tokens)
        if tokens[1] >= prefill.step_tokens_min:  # otherwise it does not matter which of them are of prompts
            tokens = tokens_of_step(output, self._requests)
        if prefill.step(*tokens) and client is not None:
            client.report_prefill_rate(min(prefill.tokens_per_s, PREFILL_TOKENS_PER_S_MAX))

    def _tell_why_nothing_hits(self, client: Client | None) -> None:
        """Warns once if nothing ever hits, because such a cache should not be silent."""
        counters = self._matcher.counters
        if counters.hits:
            self._told = True
        elif client is not None and counters.lookups + counters.local >= LOOKUPS_WITHOUT_HIT:
            self._told = True
            status, stored = client.status, self._storer.counters
            self._log.warning(
                "kvtier: none of %d lookups found a block. Namespace %s holds blocks of engines with the "
                "same model, weights, dtype, layout and hash scheme only; this engine stored %d blocks, %d "
                "stores were refused. Last error: %s",
                counters.lookups + counters.local,
                status.namespace_digest[:16],
                stored.blocks,
                stored.refused,
                status.last_error or "none",
            )
