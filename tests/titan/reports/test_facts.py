from mxtrain.titan.parse import parse_job_config
from mxtrain.titan.reports.facts import run_facts


def test_a_high_precision_run_has_no_numerics():
    facts = run_facts(parse_job_config(["--job.dump_folder=outputs/my-run/", "--model.flavor=debugmodel"]))
    assert (facts["name"], facts["converter"], facts["world_size"]) == ("my-run", "none", 1)
    assert all(facts[key] is None for key in ("recipe", "p", "estimator", "scale_rounding", "mode"))
