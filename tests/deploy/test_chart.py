"""The Helm chart: what it renders agrees with itself, with Kubernetes and with the servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import harness
import helm_python
import kubernetes_objects as k8s
import manifest_checks as checks
import manifests
import memory
import pytest
import yaml
from kubernetes_examples import EXAMPLES, REPOSITORY, example_values
from network_arrows import arrows
from pod_machine import Machine
from tandem.cli.command_line import EXIT_UNTRAINED, EXIT_USAGE
from tandem.rpc.transport import Connection

RULES = REPOSITORY / "deploy" / "prometheus" / "rules"
DASHBOARDS = REPOSITORY / "deploy" / "grafana" / "dashboards"
# The objects that a release of an example expects to be there.
GIVEN = ("models", "runs", "tandem-tls", "tandem-tokens")
# Pods outside of a release.
OTHERS = {
    "prometheus": {"namespace": "monitoring", "app.kubernetes.io/name": "prometheus"},
    "dns": {"namespace": "kube-system", "k8s-app": "kube-dns"},
    "node's dns": {"address": "169.254.20.10"},
    "stranger": {"namespace": "default"},
    "neighbour": {"namespace": "tandem"},
}


@pytest.fixture(scope="module")
def known_metrics():
    """The names of docs/reference/metrics.md."""
    page = (REPOSITORY / "docs/reference/metrics.md").read_text()
    return set(re.findall(r"(?m)^\| `(\w+)` \| (?:counter|gauge|histogram|summary) \|", page))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_valid_kubernetes(examples, example):
    assert checks.schema_problems(examples[example]) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_of_an_example_is_restricted(examples, example):
    assert checks.security_problems(examples[example]) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_an_example_names_exists(examples, example):
    objects = examples[example]
    assert checks.volume_problems(objects, GIVEN) == []
    assert checks.selector_problems(objects) == []
    assert checks.address_problems(objects) == []
    assert checks.probe_problems(objects) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_programs_accept_what_an_example_gives_them(examples, example, models, certs, tmp_path):
    assert Machine(tmp_path, models, certs).problems(examples[example]) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_requests_of_an_example_are_the_plan_of_its_servers(example, models):
    values = example_values(example)
    for role, size in memory.plans(values, models).items():
        resources = values[role]["resources"]
        assert resources["requests"]["memory"] == f"{memory.request(size)}Gi", role
        assert resources["limits"]["memory"] == resources["requests"]["memory"], role


@pytest.mark.parametrize("example", ["gpu", "gpu-node"])
def test_the_servers_of_a_gpu_example_fit_into_gpus_of_80_gb(example, models):
    values = example_values(example)
    planned = memory.gpu_plans(values, models, "80GB")
    assert planned.keys() == {"rollout", "trainer"}
    for role, size in planned.items():
        assert 1 < size < 72, role  # a tenth is left to CUDA and the allocator
        gpus = values[role]["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == values[role].get("ranksPerPod", 1)
    with pytest.raises(RuntimeError, match="GPU"):
        memory.gpu_plans(values, models, "2GB")


def test_the_lanes_of_a_gpu_node_have_room_for_every_sequence(models):
    rollout = memory.configurations(example_values("gpu-node"))["rollout"]
    done = memory.check_config("rollout", rollout, 1, models, "--assume-gpu-memory", "80GB")
    for lane in ("senior", "junior"):
        assert re.search(rf"{lane}_kv_cache .*room for 128 of max_num_seqs=128 ", done.stdout)


def test_the_policies_allow_the_arrows_of_the_architecture_alone(examples):
    assert arrows(examples["with-critic"], OTHERS) == {
        "client → rollout:7701",
        "client → trainer:7702",
        "client → critic:7703",
        "trainer → rollout:7701",
        "trainer → critic:7703",
        "prometheus → rollout:9701",
        "prometheus → trainer:9702",
        "prometheus → critic:9703",
        *(
            f"{pod} → {dns}:53"
            for pod in ("client", "rollout", "trainer", "critic")
            for dns in ("dns", "node's dns")
        ),
    }


def test_the_policies_let_ranks_reach_each_other(examples):
    for example in ("ranks-lws", "ranks-statefulset", "ranks-pod"):
        assert arrows(examples[example], OTHERS) == {
            "rollout → rollout:*",
            "trainer → trainer:*",
            "trainer → rollout:7701",
            "prometheus → rollout:9701",
            "prometheus → trainer:9702",
            *(f"{p} → {d}:53" for p in ("rollout", "trainer") for d in ("dns", "node's dns")),
        }


def test_only_the_import_reaches_a_model_hub():
    values = example_values("cpu-small")
    hub = {"steps": [{"command": ["hf", "download", "a/b", "--local-dir", "/models/b"]}]}
    values["models"]["import"] = hub
    found = arrows(manifests.manifests(manifests.render(values)), OTHERS)
    assert {arrow for arrow in found if arrow.endswith(":443")} == {
        f"models → {target}:443" for target in OTHERS
    }


def test_rules_and_dashboards_use_known_metrics(examples, known_metrics):
    assert "tandem_server_ready" in known_metrics
    assert checks.metric_problems(examples["tls"], known_metrics) == []


def test_the_rules_are_those_of_the_prometheus_files(examples):
    [rule] = k8s.of_kind(examples["tls"], "PrometheusRule").values()
    groups = [
        group
        for path in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert groups
    assert rule["spec"]["groups"] == groups


def test_a_packaged_chart_holds_the_rules_and_the_dashboards(tmp_path):
    with helm_python.Chart.load(manifests.CHART) as chart:
        archive = chart.save(tmp_path)
    with tarfile.open(archive) as files:
        members = {member.name: member for member in files}
        for folder in (RULES, DASHBOARDS):
            for path in folder.iterdir():
                name = f"tandem/files/{folder.name}/{path.name}"
                assert members[name].isfile()
                assert files.extractfile(name).read() == path.read_bytes()


def target_labels(monitor, pod):
    """The labels that Prometheus gives to the target of a pod, by its monitor."""
    labels = {"__meta_kubernetes_pod_name": pod.name}
    for rule in monitor["spec"]["endpoints"][0]["relabelings"]:
        source = ";".join(labels[name] for name in rule.get("sourceLabels", []))
        if found := re.fullmatch(rule.get("regex", "(.*)"), source):
            labels[rule["targetLabel"]] = rule.get("replacement", found[1])
    return {name: value for name, value in labels.items() if not name.startswith("__")}


@pytest.mark.parametrize("example", ["tls", "ranks-lws", "ranks-statefulset", "with-critic"])
def test_targets_have_the_labels_of_the_prometheus_files(example):
    values = example_values(example) | {"serviceMonitor": {"enabled": True}}
    objects = manifests.manifests(manifests.render(values))
    monitors = k8s.of_kind(objects, "ServiceMonitor")
    scraped = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())["scrape_configs"][0]
    wanted = {"job", *scraped["static_configs"][0]["labels"]}
    found = []
    for pod in k8s.servers(objects):
        labels = target_labels(monitors[f"tandem-{pod.component}"], pod)
        assert labels.keys() == wanted
        assert labels["job"] == scraped["job_name"]
        assert labels["rank"] == pod.environment().get("RANK", "0")
        assert re.fullmatch(rf"{pod.component}-\d+", labels["server"])
        found.append((labels["server"], labels["rank"]))
    assert len(set(found)) == len(found)


def test_helm_finds_nothing_to_complain_of():
    said = helm_python.lint(manifests.CHART, example_values("tls"))
    assert [m for m in said["messages"] if m["error"] != "icon is recommended"] == []


def test_the_generated_files_are_current():
    assert manifests.main("check") == 0


def test_every_value_is_documented_and_in_the_schema():
    defaults = yaml.safe_load((manifests.CHART / "values.yaml").read_text())
    schema = json.loads(manifests.SCHEMA.read_text())

    def compare(values, properties, path):
        assert values.keys() == properties.keys() - {"global"}, path
        for key, value in values.items():
            inner = properties[key].get("properties")
            if inner and value:
                compare(value, inner, f"{path}{key}.")

    compare(defaults, schema["properties"], "")


def test_the_schema_refuses_unknown_and_wrong_values(subtests):
    for change, says in [
        ({"rolout": {}}, "rolout"),
        ({"rollout": {"replica": 2}}, "replica"),
        ({"rollout": {"replicas": 0}}, "replicas"),
        ({"rollout": {"config": {"senior_model": "/models/a", "max_seqs": 4}}}, "max_seqs"),
        ({"rollout": {"config": {"max_num_seqs": "many"}}}, "max_num_seqs"),
        ({"rollout": {"config": {"on_weight_update": "drop"}}}, "on_weight_update"),
        ({"trainer": {"config": {"optimizer": {"learning_rat": 1}}}}, "learning_rat"),
        ({"trainer": {"config": {"server": {"grpc_port": 1}}}}, "grpc_port"),
        ({"trainer": {"config": {"critic_address": "a:1"}}}, "critic_address"),
        ({"trainer": {"scratchSize": "lots"}}, "scratchSize"),
        ({"ranks": {"mode": "deployment"}}, "mode"),
        ({"run": {"command": "eval"}}, "command"),
        ({"models": {"import": {"steps": [{"comand": ["a"]}]}}}, "comand"),
    ]:
        refused = pytest.raises(helm_python.HelmValuesError, match=says)
        with subtests.test(change=change, says=says), refused:
            manifests.render(example_values("tls") | change)


def test_values_that_contradict_each_other_are_refused(subtests):
    for change, says in [
        ({"tls": {}}, "tls.secretName: name a Secret"),
        ({"trainer": {}}, "trainer.config.model: required"),
        ({"trainer": {"ranks": 2, "config": {"model": "/models/a"}}}, "ranks.privateNetwork: true"),
        ({"run": {"enabled": True}}, "run.config.run_dir: required"),
        ({"run": {"enabled": True, "config": {"run_dir": "/tmp/a"}}}, "must be below /runs"),
        (
            {"run": {"enabled": True, "config": {"run_dir": "/runs/a", "servers": {}}}},
            "run.config.servers: the chart sets the servers",
        ),
    ]:
        refused = pytest.raises(helm_python.HelmRenderError, match=says)
        with subtests.test(change=change, says=says), refused:
            manifests.render(example_values("tls") | change)


def test_a_changed_configuration_restarts_the_pods_of_its_role_alone():
    values = example_values("with-critic")
    before = k8s.of_kind(manifests.manifests(manifests.render(values)), "StatefulSet")
    values["trainer"]["config"]["max_samples"] = 100
    after = k8s.of_kind(manifests.manifests(manifests.render(values)), "StatefulSet")
    restarted = {name for name in before if before[name] != after[name]}
    assert restarted == {"tandem-trainer"}


def test_a_changed_run_is_another_job():
    values = example_values("cpu-small")
    jobs = []
    for steps in (16, 16, 17):
        values["run"]["config"]["steps"] = steps
        objects = manifests.manifests(manifests.render(values))
        jobs.append([name for name in k8s.of_kind(objects, "Job") if "-run-" in name])
    assert jobs[0] == jobs[1]
    assert jobs[1] != jobs[2]


def test_a_run_waits_for_its_predecessor_and_is_given_up_by_its_exit_codes_alone():
    values = example_values("cpu-small")
    values["run"]["graceSeconds"] = 700
    jobs = k8s.of_kind(manifests.manifests(manifests.render(values)), "Job")
    [job] = [one for name, one in jobs.items() if "-run-" in name]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    # An upgrade deletes the earlier Job, whose pod may take its grace to end a step and to save.
    assert command[command.index("--wait-for-lock") + 1] == "760"
    codes = [
        rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if rule["action"] == "FailJob"
    ]
    assert codes == [[EXIT_USAGE, EXIT_UNTRAINED]]


def rendered(values, **options):
    return manifests.manifests(manifests.render(values, **options))


def test_a_release_name_that_no_service_can_have_is_refused(subtests):
    for name in ["a.b", "7b-run", "tandem.", "Tandem"]:
        with (
            subtests.test(name=name),
            pytest.raises(helm_python.HelmError, match=r"name of the release|invalid release name"),
        ):
            manifests.render(example_values("tls"), release=name)


def test_an_image_without_a_tag_gets_the_charts(subtests):
    for image, full in [
        ("tandem-trainer", "tandem-trainer:{version}"),
        ("team/tandem-trainer", "team/tandem-trainer:{version}"),
        ("reg:5000/team/tandem-trainer", "reg:5000/team/tandem-trainer:{version}"),
        ("reg:5000/team/tandem-trainer:v1", "reg:5000/team/tandem-trainer:v1"),
        ("tandem-trainer:v1", "tandem-trainer:v1"),
        ("team/tandem-trainer@sha256:ab", "team/tandem-trainer@sha256:ab"),
    ]:
        with subtests.test(image=image, full=full):
            values = example_values("tls")
            values["trainer"]["image"] = image
            pod = k8s.of_kind(rendered(values), "StatefulSet")["tandem-trainer"]["spec"]["template"]
            version = yaml.safe_load((manifests.CHART / "Chart.yaml").read_text())["appVersion"]
            assert pod["spec"]["containers"][0]["image"] == full.format(version=version)


def test_a_file_of_the_run_arrives_as_it_is(subtests):
    for text in [
        "    indented = 1\nplain = 2\n",
        "dos\r\nlines\r\n",
        "no line end",
        "several line ends\n\n\n",
        "\n\nfirst lines are empty",
        "\ttab: {{ not a template }}\n",
        "",
        "é ☃ \u2028 \\ \" '",
    ]:
        with subtests.test(text=text):
            values = example_values("cpu-small")
            values["run"]["files"] = {"rows.jsonl": text}
            found = k8s.of_kind(rendered(values), "ConfigMap")["tandem-run"]["data"]["rows.jsonl"]
            assert found == text


def test_settings_of_pods_reach_them():
    values = example_values("with-critic")
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    values["serviceAccountName"] = "gpu-users"
    values["podSecurityContext"] = {"fsGroup": 1234, "supplementalGroups": [7]}
    values["containerSecurityContext"] = {"seLinuxOptions": {"level": "s0:c1"}}
    values["run"]["ttlSecondsAfterFinished"] = 600
    for role in ("rollout", "trainer", "critic", "run"):
        values[role] |= {
            "podLabels": {"team": "x"},
            "topologySpreadConstraints": spread,
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        }
    objects = rendered(values)
    assert checks.schema_problems(objects) == []
    assert checks.volume_problems(objects, GIVEN) == []
    seen = set()
    for pod in k8s.pods(objects):
        assert pod.labels["team"] == "x"
        assert pod.spec["serviceAccountName"] == "gpu-users"
        assert pod.spec["topologySpreadConstraints"] == spread
        security = pod.spec["securityContext"]
        assert (security["fsGroup"], security["supplementalGroups"]) == (1234, [7])
        assert security["runAsNonRoot"] is True
        assert pod.container["securityContext"]["seLinuxOptions"] == {"level": "s0:c1"}
        assert pod.container["securityContext"]["readOnlyRootFilesystem"] is True
        seen.add(pod.component)
    assert seen == {"rollout", "trainer", "critic", "client"}
    [job] = k8s.of_kind(objects, "Job").values()
    assert job["spec"]["ttlSecondsAfterFinished"] == 600


def test_ranks_of_a_pod_share_its_memory_and_its_devices():
    values = example_values("ranks-pod")
    found = {pod.name: pod for pod in k8s.servers(rendered(values))}
    assert {name: pod.environment()["RANK"] for name, pod in found.items()} == {
        "tandem-rollout-0": "0",
        "tandem-rollout-1": "0",
        "tandem-trainer-0-0": "0",
        "tandem-trainer-0-1": "2",
    }
    trainer = found["tandem-trainer-0-1"]
    assert trainer.environment()["MASTER_ADDR"] == "tandem-trainer-0-0.tandem-trainer.tandem.svc"
    assert trainer.environment()["WORLD_SIZE"] == "4"
    assert {"name": "shm", "mountPath": "/dev/shm"} in trainer.container["volumeMounts"]
    # One pod alone needs no private network.
    values["ranks"]["privateNetwork"] = False
    values["trainer"] |= {"ranks": 2}
    assert rendered(values)


def test_ranks_that_do_not_fill_their_pods_are_refused():
    values = example_values("ranks-pod")
    values["trainer"]["ranks"] = 3
    with pytest.raises(helm_python.HelmRenderError, match=r"ranksPerPod: 2 does not divide"):
        manifests.render(values)


RANKS = manifests.CHART / "files" / "ranks.sh"


def run_ranks(program, tmp_path, count=3, **environment):
    """Starts ranks.sh with a shell program as the server."""
    return subprocess.Popen(
        [RANKS, str(count), "6", "master", "29500", "bash", "-c", program],
        env={"PATH": os.environ["PATH"], "POD_INDEX": "1", "OUT": str(tmp_path)} | environment,
    )


def test_every_rank_of_a_pod_gets_its_number(tmp_path):
    wanted = {f"{3 + r}_{r}_3_6_master_29500" for r in range(3)}
    names = "${RANK}_${LOCAL_RANK}_${LOCAL_WORLD_SIZE}_${WORLD_SIZE}_${MASTER_ADDR}_${MASTER_PORT}"
    # A rank ends when all are there: the end of the first ends the others.
    wait = 'until [ "$(ls "$OUT" | wc -l)" -eq 3 ]; do sleep 0.05; done'
    process = run_ranks(f'touch "$OUT/{names}"; {wait}', tmp_path)
    assert process.wait(timeout=60) in (0, 143)
    assert {path.name for path in tmp_path.iterdir()} == wanted


def test_a_rank_that_ends_takes_the_others_with_it(tmp_path):
    process = run_ranks('[ "$LOCAL_RANK" != 1 ] || exit 7; sleep 600 & wait', tmp_path)
    assert process.wait(timeout=60) == 7


def test_a_signal_drains_every_rank(tmp_path):
    program = (
        'trap \'touch "$OUT/drained$RANK"; exit 0\' TERM; touch "$OUT/up$RANK"; '
        "while true; do sleep 0.05; done"
    )
    process = run_ranks(program, tmp_path)
    harness.wait_until(lambda: len(list(tmp_path.glob("up*"))) == 3)
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert len(list(tmp_path.glob("drained*"))) == 3


@pytest.mark.parametrize("there", [True, False])
def test_a_pod_waits_for_the_import_and_gives_up(tmp_path, there):
    values = example_values("cpu-small")
    values["models"]["import"] = {"steps": [{"command": ["true"]}], "waitSeconds": 1}
    for pod in k8s.pods(rendered(values)):
        if pod.component not in ("rollout", "client"):
            continue
        [init] = pod.spec["initContainers"]
        marker = re.search(r"/models/\.imported-\w+", init["command"][2])[0]
        if there:
            (tmp_path / marker.removeprefix("/models/")).touch()
        script = init["command"][2].replace("/models/", f"{tmp_path}/")
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == (0 if there else 1)
        assert there or "models.import.waitSeconds" in done.stderr


POD = "spec/template/spec"
SERVER = f"{POD}/containers/0"
WRONG = yaml.safe_load(Path(__file__).with_name("wrong_objects.yaml").read_text())


def test_a_wrong_object_is_found(examples, subtests):
    good = examples["tls"]
    for name, changed, path, value, says in WRONG:
        check = getattr(checks, f"{name}_problems")
        given = [GIVEN] if check is checks.volume_problems else []
        path = path.replace("SERVER", SERVER).replace("POD/", f"{POD}/")
        with subtests.test(check=name, changed=changed, path=path, value=value, says=says):
            assert check(good, *given) == []
            bad = k8s.changed(good, *changed.split("/"), path, value)
            assert any(says in problem for problem in check(bad, *given)), check(bad, *given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 7702),
        ("service", "tandem.rollout.v1.Rollout"),
        ("service", "tandem.trainer.v1.TrainerService"),
    ],
)
def test_a_wrong_grpc_probe_is_found(examples, field, value):
    path = f"{SERVER}/startupProbe/grpc/{field}"
    bad = k8s.changed(examples["cpu-small"], "StatefulSet", "tandem-rollout", path, value)
    assert any("startupProbe asks" in problem for problem in checks.probe_problems(bad))


def test_running_servers_have_the_services_that_probes_ask_for(tmp_path):
    tiny = harness.make_models(tmp_path / "models")
    with harness.cluster(tmp_path, tiny, trainer={}, critic={}) as running:
        for server in running.servers:
            with Connection(server.address) as connection:
                assert connection.check_health(k8s.SERVICES[server.role]).status == "SERVING"
                assert connection.check_health("liveness").status == "SERVING"
                others = set(k8s.SERVICES.values()) - {k8s.SERVICES[server.role]}
                for service in others:
                    assert connection.check_health(service).status != "SERVING"


def with_config(objects, role, change):
    """The objects with a changed configuration of a role's servers."""
    config = yaml.safe_load(
        k8s.of_kind(objects, "ConfigMap")[f"tandem-{role}"]["data"]["config.yaml"]
    )
    change(config)
    return k8s.changed(
        objects, "ConfigMap", f"tandem-{role}", "data", {"config.yaml": yaml.safe_dump(config)}
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config.update(max_num_seq=4), "max_num_seq: unknown key"),
        (lambda config: config["senior"].update(model="/models/nowhere"), "nowhere"),
        (
            lambda config: config["senior"].update(model="/model/SmolLM2-135M-Instruct"),
            "is on no volume",
        ),
        (
            lambda config: config["server"].update(grpc_port=7705),
            "are not those of its configuration",
        ),
        (
            lambda config: config["server"].update(metrics_port=7705),
            "are not those of its configuration",
        ),
        (lambda config: config["server"].update(host="127.0.0.1"), "binds 127.0.0.1"),
        (
            lambda config: config["server"].update(drain_seconds=3600),
            "killed before it has drained",
        ),
    ],
)
def test_a_wrong_configuration_is_found(examples, models, certs, tmp_path, change, says):
    bad = with_config(examples["cpu-small"], "rollout", change)
    problems = Machine(tmp_path, models, certs).problems(bad)
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (f"{SERVER}/command/0", "tandem-rollout-server", "runs tandem-rollout-server"),
        (f"{SERVER}/command/1", "--configuration", "--configuration"),
        (f"{SERVER}/env/1/name", "TANDEM__SERVER__ADVERTISED", "server.advertised: unknown key"),
        (f"{SERVER}/env/2/value", "/tmp", "TMPDIR: /tmp is on no volume"),
        (f"{SERVER}/volumeMounts/2", {"name": "runs", "mountPath": "/run"}, "is on no volume"),
    ],
)
def test_a_wrong_container_is_found(examples, models, certs, tmp_path, path, value, says):
    bad = k8s.changed(examples["cpu-small"], "StatefulSet", "tandem-trainer", path, value)
    bad = with_config(
        bad, "trainer", lambda c: c.update(shutdown_checkpoint_directory="/runs/last")
    )
    problems = Machine(tmp_path, models, certs).problems(bad)
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (f"{SERVER}/command/1", "learn", "runs tandem learn"),
        (f"{SERVER}/command/4", "never", "does not resume"),
        (f"{SERVER}/command/7", "servers.rollouts=[a:1]", "rollouts"),
        (f"{SERVER}/command/8", "steps=4", "is told of"),
        (f"{SERVER}/volumeMounts/2/mountPath", "/run", "run_dir is not on the volume"),
    ],
)
def test_a_wrong_run_is_found(examples, models, certs, tmp_path, path, value, says):
    bad = k8s.changed(examples["cpu-small"], "Job", "tandem-run-", path, value)
    problems = Machine(tmp_path, models, certs).problems(bad)
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["tandem_server_redy", "tandem_queue", "grpc_server_handled"])
def test_an_unknown_metric_in_a_rule_is_found(examples, known_metrics, name):
    path = "spec/groups/0/rules/0/expr"
    bad = k8s.changed(examples["tls"], "PrometheusRule", "tandem", path, f"rate({name}[5m]) > 0")
    assert checks.metric_problems(bad, known_metrics) == [
        f"PrometheusRule tandem: {name} is no metric"
    ]


def test_an_unknown_metric_in_a_dashboard_is_found(examples, known_metrics):
    name = "tandem_server_ready"
    good = examples["tls"]
    bad = json.loads(json.dumps(good).replace(name, "tandem_server_redy"))
    assert any("ConfigMap" in problem for problem in checks.metric_problems(bad, known_metrics))


def test_a_policy_that_allows_more_is_found(examples):
    wide = k8s.changed(
        examples["with-critic"], "NetworkPolicy", "tandem-rollout", "spec/ingress/0", {}
    )
    extra = arrows(wide, OTHERS) - arrows(examples["with-critic"], OTHERS)
    assert "stranger → rollout:*" in extra
