"""Fake servers in this process: they implement the contract without any model."""

from __future__ import annotations

import json
import time
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import xxhash
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tandem._proto.critic.v1 import critic_pb2, critic_pb2_grpc
from tandem._proto.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem._proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem._proto.types.v1 import optimizer_pb2, server_pb2, tensor_pb2, trajectory_pb2
from tandem._proto.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool
from tandem.rpc.author_schedule import TOKEN, authorship_mask, uniform
from tandem.rpc.client import RolloutClient
from tandem.rpc.wire import tandem_record, to_tensor

VOCABULARY = 64
EOS = 0
REPOSITORY = Path(__file__).resolve().parents[3]


def error_status(code, message, *, field=None, reason=None, retry_seconds=None):
    details = []
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if reason:
        details.append(error_details_pb2.ErrorInfo(reason=reason, domain="tandem"))
    if retry_seconds:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_seconds * 1e9))
        details.append(retry)
    packed = []
    for detail in details:
        item = any_pb2.Any()
        item.Pack(detail)
        packed.append(item)
    return status_pb2.Status(code=code, message=message, details=packed)


def weights(version, digest="d"):
    return server_pb2.WeightsVersion(version=version, digest=digest)


class FakeWorld:
    """The state that the fake servers share; tests read and set it."""

    def __init__(self):
        self.version = 0
        self.published = 0
        self.failures = []  # google.rpc.Status with which the next calls fail, in order
        self.calls = []  # (method, x-request-id)
        self.steps = {}
        self.traceparents = []  # `traceparent` of the calls, None without one
        self.headers = []
        self.targets = []  # addresses of the last PublishWeights
        self.saved = {}
        self.keeps = []  # `keep` of every SaveCheckpoint
        self.served_digest = "d"  # digest of the rollout servers' weights; the trainer's is "d"
        self.rollout_weights = weights(0, "")  # those in a rollout server's GetServerInfo
        self.batches = []  # request_ids of every batch that Generate admitted
        self.open_streams = 0  # Generate calls that have not ended
        self.cut_calls = 0  # Generate calls that the client cancelled
        self.max_model_len = 128
        self.adapter = None  # AdapterInfo of the trainer's model
        self.micro_batches = lambda: (0, 0)  # done, of how many, in the trainer's GetServerInfo
        self.junior_max_model_len = 128
        self.cut_streams = 0  # Generate calls to break off after one sample
        self.on_open = lambda context: None  # called by Generate once open_streams counts it
        self.on_batch = lambda: None  # called before a batch of Generate, or a Score, is answered
        self.on_prompt = lambda prompt: None  # called with every prompt of Generate
        self.watched = []  # reports that WatchSteps streams
        self.on_samples = lambda samples: None  # called with the samples of every TrainStep
        self.metrics_of = lambda header: {}  # further metrics of a TrainStep's report
        self.has_junior = True
        self.junior_version = "j"
        self.speculator_heads = 0
        self.drafts_of = lambda prompt: (0, 0)  # drafts verified and accepted in a response
        self.scores = 0  # number of Score calls
        self.score_temperatures = []  # temperature of every Score
        self.top = []  # tokens of which Score returns the likeliest
        # In Score, and in ComputeLogProbs.
        self.logprob = {
            "senior": lambda token: -1.0,
            "junior": lambda token: -2.0,
            "reference": lambda token: -1.5,
        }
        self.on_save = lambda context: None  # called by every SaveCheckpoint of the trainer
        self.on_load = lambda context: None  # called by every LoadCheckpoint of the trainer
        self.writes_beside = False  # whether the trainer writes checkpoints beside other calls
        self.being_written = {}  # versions by path
        self.on_write = lambda context: None  # called before such a checkpoint is on disk
        self.unsaved = False  # whether the trainer holds updates that no checkpoint has
        self.loads = []  # path of every LoadCheckpoint, "" for the base model
        self.optimizer = None  # the trainer's OptimizerInfo
        self.fresh_loads = []  # paths that were loaded with a fresh optimizer
        self.publications = []  # (version, allow_rollback) of every PublishWeights
        self.max_queue = 4096
        self.max_num_seqs = 64
        self.max_samples = 4096
        self.has_speculator = False  # the trainer
        self.speculator_version = None  # of the rollout server; None: no senior_speculator
        self.vocabulary_digest = ""
        self.parameters = 1000
        self.eos_token_ids = [EOS]
        self.sample = sample  # the response to a prompt: (prompt, sample's index, version)
        self.objective_failure = None  # google.rpc.Status with which CheckObjective fails

    def describe(self, model):
        model.vocab_size = model.num_token_ids = VOCABULARY
        model.vocabulary_digest = self.vocabulary_digest
        model.num_parameters = self.parameters
        model.eos_token_ids[:] = self.eos_token_ids

    def enter(self, method, context):
        metadata = dict(context.invocation_metadata())
        self.calls.append((method, metadata.get("x-request-id")))
        self.traceparents.append(metadata.get("traceparent"))
        if self.failures:
            status = self.failures.pop(0)
            context.abort_with_status(rpc_status.to_status(status))


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer, weights_pb2_grpc.WeightServiceServicer):
    def __init__(self, world, model_path=""):
        self.world = world
        self.model_path = model_path

    def GetServerInfo(self, request, context):
        self.world.enter("GetServerInfo", context)
        reply = rollout_pb2.GetServerInfoResponse(
            max_queue=self.world.max_queue,
            max_num_seqs=self.world.max_num_seqs,
            speculator_heads=self.world.speculator_heads,
        )
        if self.world.has_junior:
            self.world.describe(reply.junior)
            reply.junior.max_model_len = self.world.junior_max_model_len
            reply.junior.dtype = tensor_pb2.DATA_TYPE_BFLOAT16
            reply.junior.quantization = server_pb2.QUANTIZATION_INT4
            reply.junior_version = self.world.junior_version
        reply.server.role = "rollout"
        reply.server.weights.CopyFrom(self.world.rollout_weights)
        self.world.describe(reply.server.model)
        reply.server.model.path = self.model_path
        reply.server.model.dtype = tensor_pb2.DATA_TYPE_BFLOAT16
        reply.server.model.quantization = server_pb2.QUANTIZATION_NONE
        reply.server.model.max_model_len = self.world.max_model_len
        reply.server.advertised_address = "rollout.cluster:7701"
        if self.world.speculator_version is not None:
            reply.speculator_weights.version = self.world.speculator_version
        return reply

    def Generate(self, requests, context):
        self.world.enter("Generate", context)
        self.world.open_streams += 1
        self.world.on_open(context)
        ended = []

        def leave():
            self.world.cut_calls += not ended
            self.world.open_streams -= 1

        if not context.add_callback(leave):  # The call has ended already.
            leave()
        yield from self._answers(requests, context)
        ended.append(True)

    def _answers(self, requests, context):
        batch = []
        for request in requests:
            if not request.HasField("submit"):
                continue
            batch.extend(request.submit.prompts)
            if request.submit.more_follow:
                continue
            self.world.batches.append([prompt.request_id for prompt in batch])
            self.world.on_batch()
            admitted, batch = batch, []
            for prompt in admitted:
                self.world.on_prompt(prompt)
                if prompt.sampling.top_k < 0:
                    yield rollout_pb2.GenerateResponse(
                        failed=rollout_pb2.FailedEvent(
                            request_id=prompt.request_id,
                            status=error_status(3, "must not be negative", field="sampling.top_k"),
                        )
                    )
                    continue
                drafted, accepted = self.world.drafts_of(prompt)
                first = prompt.first_sample_index
                for index in reversed(range(first, first + max(1, prompt.num_samples))):
                    if prompt.stream_tokens:
                        yield from token_events(prompt, self.world.sample(prompt, index, 0))
                    yield rollout_pb2.GenerateResponse(
                        finished=rollout_pb2.FinishedEvent(
                            request_id=prompt.request_id,
                            trajectory=self.world.sample(prompt, index, self.world.published),
                            draft_tokens=drafted,
                            accepted_draft_tokens=accepted,
                        )
                    )
                    if self.world.cut_streams:
                        self.world.cut_streams -= 1
                        status = error_status(14, "going away")
                        context.abort_with_status(rpc_status.to_status(status))

    def Score(self, request, context):
        self.world.enter("Score", context)
        self.world.scores += 1
        self.world.score_temperatures.append(request.temperature)
        self.world.on_batch()
        reply = rollout_pb2.ScoreResponse(
            weights=weights(self.world.published, self.world.served_digest)
        )
        for sequence in request.sequences:
            scored = sequence.token_ids[sequence.first_scored_token :]
            scores = reply.sequences.add()
            for model in ("senior", "junior"):
                if getattr(request, model):
                    logprobs = to_tensor([self.world.logprob[model](token) for token in scored])
                    getattr(scores, f"{model}_logprobs").CopyFrom(logprobs)
                if getattr(request, model) and request.num_top_logprobs:
                    known = {token: self.world.logprob[model](token) for token in self.world.top}
                    top = sorted(known, key=lambda token: (-known[token], token))
                    top = [top[: request.num_top_logprobs]] * len(scored)
                    numbers = [[known[token] for token in place] for place in top]
                    getattr(scores, f"{model}_top_token_ids").CopyFrom(to_tensor(top, "<i4"))
                    getattr(scores, f"{model}_top_logprobs").CopyFrom(to_tensor(numbers))
        return reply

    def GetVersion(self, request, context):
        return weights_pb2.GetVersionResponse(
            weights=weights(self.world.published, self.world.served_digest)
        )


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """A trainer whose loss is a function of the samples, so that runs can be compared."""

    def __init__(self, world):
        self.world = world

    def GetServerInfo(self, request, context):
        self.world.enter("GetServerInfo", context)
        done, count = self.world.micro_batches()
        reply = trainer_pb2.GetServerInfoResponse(
            micro_batches_done=done,
            micro_batches=count,
            unsaved=self.world.unsaved,
            max_samples=self.world.max_samples,
            has_speculator=self.world.has_speculator,
        )
        if self.world.optimizer is not None:
            reply.optimizer.CopyFrom(self.world.optimizer)
        self.world.describe(reply.server.model)
        if self.world.adapter is not None:
            reply.server.model.adapter.CopyFrom(self.world.adapter)
        reply.server.weights.version = self.world.version
        reply.server.weights.digest = "d"
        reply.server.model.max_model_len = self.world.max_model_len
        return reply

    def TrainStep(self, requests, context):
        header, *samples = [getattr(request, request.WhichOneof("message")) for request in requests]
        self.world.enter("TrainStep", context)
        self.world.headers.append(header)
        self.world.on_samples(samples)
        if header.request_id in self.world.steps:
            reply = self.world.steps[header.request_id]
            return trainer_pb2.TrainStepResponse(report=reply, replayed=True)
        if header.expected_version != self.world.version:
            status = error_status(9, "stale", reason="STALE_POLICY_VERSION")
            context.abort_with_status(rpc_status.to_status(status))
        self.world.version += 1
        self.world.unsaved = True
        responses = [getattr(s, "trajectory", s).response_token_ids for s in samples]
        report = trainer_pb2.StepReport(
            step=header.step,
            weights=weights(self.world.version),
            metrics={
                "loss/total": sum(map(sum, responses)) / 1000,
                "policy/grad_norm": float("inf"),
                "tokens/response": sum(map(len, responses)),
                "tandem/senior_token_fraction": 0.5,
                **self.world.metrics_of(header),
            },
        )
        self.world.steps[header.request_id] = report
        return trainer_pb2.TrainStepResponse(report=report)

    def ComputeLogProbs(self, requests, context):
        self.world.enter("ComputeLogProbs", context)
        for request in requests:
            model = "reference" if request.reference else "senior"
            logprobs = [self.world.logprob[model](t) for t in request.response_token_ids]
            yield trainer_pb2.ComputeLogProbsResponse(
                logprobs=to_tensor(logprobs), weights=weights(self.world.version)
            )

    def PublishWeights(self, request, context):
        world = self.world
        world.enter("PublishWeights", context)
        world.publications.append((world.version, request.allow_rollback))
        world.targets = list(request.targets)
        reply = trainer_pb2.PublishWeightsResponse(weights=weights(world.version))
        for target in request.targets:
            result = reply.results.add(target=target, digest="d")
            if world.has_speculator:
                unused = world.speculator_version is None
                result.speculator = (
                    trainer_pb2.SPECULATOR_DELIVERY_UNUSED
                    if unused
                    else trainer_pb2.SPECULATOR_DELIVERY_SERVED
                )
            if world.version < world.published and not request.allow_rollback:
                stale = error_status(9, "stale", reason="STALE_WEIGHT_VERSION")
                result.status.CopyFrom(stale)
                return reply
        world.published, world.served_digest = world.version, "d"
        return reply

    def CheckObjective(self, request, context):
        self.world.enter("CheckObjective", context)
        if self.world.objective_failure is not None:
            context.abort_with_status(rpc_status.to_status(self.world.objective_failure))
        reply = trainer_pb2.CheckObjectiveResponse(policy=request.policy)
        if not reply.policy.HasField("clip_ratio_low"):
            reply.policy.clip_ratio_low = 0.2
        reply.policy.loss_kind = reply.policy.loss_kind or 1
        return reply

    def WatchSteps(self, request, context):
        for report in self.world.watched:
            yield trainer_pb2.WatchStepsResponse(report=report)

    def ExportModel(self, request, context):
        self.world.enter("ExportModel", context)
        return trainer_pb2.ExportModelResponse(path=request.path)

    def SaveCheckpoint(self, request, context):
        path = f"{request.directory}/{request.name}"
        if path in self.world.being_written and not request.in_background:
            version = self.world.being_written.pop(path)
            self.world.on_write(context)
        else:
            self.world.on_save(context)
            version = self.world.version
            if request.expected_version != version:
                status = error_status(9, "stale", reason="STALE_POLICY_VERSION")
                context.abort_with_status(rpc_status.to_status(status))
            self.world.keeps.append(request.keep)
            if request.in_background and self.world.writes_beside:
                self.world.being_written[path] = version
                return trainer_pb2.SaveCheckpointResponse(path=path, pending=True)
        write_checkpoint(Path(path))
        self.world.saved[path] = version
        self.world.unsaved = self.world.version != version
        return trainer_pb2.SaveCheckpointResponse(path=path)

    def LoadCheckpoint(self, request, context):
        self.world.on_load(context)
        self.world.loads.append(request.path)
        if request.optimizer == optimizer_pb2.OPTIMIZER_STATE_FRESH:
            self.world.fresh_loads.append(request.path)
        self.world.version = 0 if request.base_model else self.world.saved[request.path]
        self.world.steps.clear()  # The ledger is part of a checkpoint; here it starts empty.
        self.world.unsaved = False
        return trainer_pb2.LoadCheckpointResponse(weights=weights(self.world.version))


class FakeCritic(critic_pb2_grpc.CriticServiceServicer):
    """A critic whose score is the sum of all token ids."""

    def __init__(self):
        self.weights = weights(3)
        self.calls = []  # the number of sequences of each ComputeValues
        self.failures = 0  # ComputeValues calls that are refused, from now on
        self.head = critic_pb2.VALUE_HEAD_SOURCE_CHECKPOINT
        self.vocabulary_digest = ""

    def GetServerInfo(self, request, context):
        reply = critic_pb2.GetServerInfoResponse(value_head_initialized_from=self.head)
        model = reply.server.model
        model.path, model.max_model_len = "/models/judge", 10
        model.vocab_size = model.num_token_ids = VOCABULARY
        model.vocabulary_digest = self.vocabulary_digest
        reply.server.weights.CopyFrom(self.weights)
        return reply

    def ComputeValues(self, requests, context):
        asked = list(requests)
        self.calls.append(len(asked))
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the judge sleeps")
        for one in asked:
            length = len(one.response_token_ids)
            score = float(sum(one.prompt_token_ids) + sum(one.response_token_ids))
            yield critic_pb2.ComputeValuesResponse(
                values=to_tensor([0.0] * length),
                final_value=to_tensor([score]),
                weights=self.weights,
            )


@contextmanager
def serve_critic(critic):
    """Serves a FakeCritic at an address, which it yields."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    critic_pb2_grpc.add_CriticServiceServicer_to_server(critic, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def write_checkpoint(path, name=None):
    """A checkpoint directory as the servers write it: files, a speculator's, and a manifest.

    The manifest has the directory's name, or another `name`, as that of a copy has.
    """
    files = ("model.safetensors", "speculator/config.json", "tandem_state.json")
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("{}")
    digest = xxhash.xxh3_128_hexdigest(b"{}")
    manifest = {
        "format": "tandem-checkpoint",
        "kind": "trainer",
        "step": 0,
        "name": path.name if name is None else name,
        "files": [{"name": file, "bytes": 2, "xxh3_128": digest} for file in files],
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def sample(prompt, index, version):
    """A response drawn uniformly, with the author schedule of the real server."""
    tokens = []
    begin = len(prompt.response.token_ids)
    for t in range(begin, begin + prompt.sampling.max_tokens):
        tokens.append(int(uniform(prompt.seed, index, t, TOKEN) * VOCABULARY))
        if tokens[-1] == EOS:
            break
    return written(prompt, index, version, tokens)


def written(prompt, index, version, tokens):
    """The response of these tokens, which go on behind those that the prompt has of it."""
    tandem = prompt.tandem
    if not tandem.HasField("enabled"):
        tandem.enabled = True
    if not tandem.selection_strategy:
        tandem.selection_strategy = 1
    if not tandem.HasField("prob_senior"):
        tandem.prob_senior = 0.5
    before = prompt.response.token_ids
    said = [t for t, author in enumerate(prompt.response.authorship_mask) if author == 2]
    whole = [*before, *tokens]
    mask = authorship_mask(whole, tandem_record(tandem), prompt.seed, index, environment=said)
    # One that writes alone may have taken over from the other.
    alone = not tandem.enabled or tandem.prob_senior == 0
    assert alone or bytes(mask[: len(before)]) == prompt.response.authorship_mask
    mask = mask[len(before) :]
    logprobs = np.log(np.arange(1, len(tokens) + 1) / 100.0)
    trajectory = trajectory_pb2.Trajectory(
        prompt_token_ids=prompt.prompt_token_ids,
        response_token_ids=tokens,
        authorship_mask=bytes(mask),
        author_logprobs=to_tensor(logprobs),
        senior_versions=[trajectory_pb2.VersionRun(weights=weights(version), count=len(tokens))],
        finish_reason=1 if tokens[-1] == EOS else 2,
        seed=prompt.seed,
        sample_index=index,
        sampling=prompt.sampling,
        tandem=tandem,
        response_offset=len(before),
    )
    if prompt.return_other_logprobs and tandem.enabled:
        trajectory.other_logprobs.CopyFrom(to_tensor(logprobs - 1))
    return trajectory


def token_events(prompt, whole):
    """Events with the tokens of a sample, two in each."""
    index = whole.sample_index
    for offset in range(0, len(whole.response_token_ids), 2):
        yield rollout_pb2.GenerateResponse(
            tokens=rollout_pb2.TokensEvent(
                request_id=prompt.request_id,
                sample_index=index,
                offset=whole.response_offset + offset,
                token_ids=whole.response_token_ids[offset : offset + 2],
                authorship_mask=whole.authorship_mask[offset : offset + 2],
            )
        )


def wait_until(condition, seconds=60):
    """Returns when the condition holds; fails if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds} s"
        time.sleep(0.01)


@contextmanager
def serve(
    world,
    model_path="",
    credentials=None,
    interceptors=(),
    address="127.0.0.1:0",
    rollout=None,
    trainer=None,
    max_calls=None,
):
    """Serves all services at one address, which it yields; with `credentials` over TLS.

    A connection has at most `max_calls` calls at a time.
    """
    options = [] if max_calls is None else [("grpc.max_concurrent_streams", max_calls)]
    server = grpc.server(futures.ThreadPoolExecutor(16), interceptors=interceptors, options=options)
    rollout = rollout or FakeRollout(world, model_path)
    trainer = trainer or FakeTrainer(world)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(rollout, server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    checker = health.HealthServicer()
    checker.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def pool(*addresses, capacity=64, progress=None):
    """A pool of the rollout servers at the addresses, which the caller closes."""
    replicas = [Replica(RolloutClient(one), capacity, 4096, has_junior=True) for one in addresses]
    return RolloutPool(replicas, progress)


def write_tokenizer(directory: Path) -> Path:
    """Writes a word-level tokenizer: id 0 is "<eos>", id i is "wi" below VOCABULARY."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<eos>": EOS} | {f"w{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }} {% endfor %}w63"
    )
    return directory
