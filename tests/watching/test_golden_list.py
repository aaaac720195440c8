"""The table of metrics in the reference is that of the code; names keep to conventions."""

from __future__ import annotations

import re

from golden_list import METRIC_NAMES, documented_metrics, exported_metrics


def test_the_table_of_metrics_is_that_of_the_code():
    exported = exported_metrics()
    assert exported["grpc_server_handling_seconds"].type == "histogram"
    assert exported["tandem_kv_tokens"].labels == ("lane",)
    assert documented_metrics() == exported


def test_names_of_metrics_follow_the_conventions():
    listed = METRIC_NAMES.count("MetricSpec k") + len(re.findall(r'\{"\w+/\w+"', METRIC_NAMES))
    assert len(exported_metrics()) == listed, "a name comes twice"
    for name, metric in exported_metrics().items():
        assert name.startswith(("tandem_", "grpc_server_", "process_"))
        assert name.endswith("_total") == (metric.type == "counter"), name
    assert all(metric.meaning.endswith(".") for metric in exported_metrics().values())
