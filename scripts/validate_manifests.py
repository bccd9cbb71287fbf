# Validates the objects of Kubernetes manifests by their schemas, strictly: a field that the schema lacks is an error.
#
# Run by scripts/validate-manifests. Built-in kinds are validated by Kubernetes' own schemas (kubernetes-validate), of the
# oldest and the newest version that we support. Kinds of KEDA and of the Prometheus operator are validated by models that
# were generated from their custom resource definitions (cloudcoil). It may not pass what it does not know: a kind without
# a schema is refused.

import sys

import kubernetes_validate
import pydantic
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

# The first has everything that the manifests use; the last is the newest that the validator knows.
KUBERNETES_VERSIONS = ["1.29", "1.37"]

CUSTOM_KINDS = {"keda.sh/v1alpha1": keda, "monitoring.coreos.com/v1": prometheus_operator}


def lost(given, kept, path=""):
    """The paths of what is in `given` and not, or otherwise, in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            inner = f"{path}.{key}"
            yield from lost(value, kept[key], inner) if key in kept else [inner]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept)):
            yield from lost(one, other, f"{path}[{number}]")
    elif given != kept:
        yield path


def refusals(thing):
    """Why this object is refused; none if it is valid."""
    version, kind = thing["apiVersion"], thing["kind"]
    if version in CUSTOM_KINDS:
        model = getattr(CUSTOM_KINDS[version], kind, None)
        if model is None:
            return [f"there is no kind {kind} in {version}"]
        try:
            kept = model.model_validate(thing).model_dump(mode="json", by_alias=True, exclude_unset=True)
        except pydantic.ValidationError as error:
            return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        # The models ignore what they do not know.
        return [f"the schema has no field {path.lstrip('.')} with this value" for path in lost(thing, kept)]
    found = []
    for kubernetes in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(thing, kubernetes, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"Kubernetes {kubernetes}: {'.'.join(map(str, error.path))}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(error.message)
    return found


def objects(file):
    with sys.stdin if file == "-" else open(file, encoding="utf-8") as stream:
        yield from (thing for thing in yaml.safe_load_all(stream) if thing)


def main(files):
    refused = 0
    for file in files:
        for thing in objects(file):
            if not isinstance(thing, dict) or not {"apiVersion", "kind"} <= thing.keys():
                print(f"refused {file}: an object has no apiVersion or no kind")
                refused += 1
                continue
            name = f"{thing['kind']} {(thing.get('metadata') or {}).get('name')}"
            why = refusals(thing)
            refused += bool(why)
            print(f"refused {file}: {name}: {'; '.join(why)}" if why else f"valid {file}: {name}")
    return 1 if refused else 0


sys.exit(main(sys.argv[1:]))
