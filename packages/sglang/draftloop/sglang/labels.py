"""Whose request it is and of what kind: how the labels of a request get from its client into the scheduler.

    client                                          HTTP process                  scheduler
    header X-Draftloop-Tenant, X-Draftloop-Domain   label_from_headers ─┐
    body   custom_params {"draftloop_tenant": ...}  ────────────────────┴──► Req.sampling_params.custom_params
    request id "{domain}--{unique}"                 ───────────────────────► Req.rid

SGLang 0.5.23 carries `custom_params` of `/v1/chat/completions`, `/v1/completions` and `/generate` to its scheduler
unread (only custom logit processors look at them); `user` and `metadata` end in the HTTP process, and `extra_key` would
split the prefix cache. A header, set by a gateway in front, wins over the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftloop.capture.admission import Labels
from draftloop.core.records import DEFAULT_LABEL

TENANT_HEADER = "X-Draftloop-Tenant"
DOMAIN_HEADER = "X-Draftloop-Domain"
TENANT_PARAM = "draftloop_tenant"
DOMAIN_PARAM = "draftloop_domain"
DOMAIN_SEPARATOR = "--"
MOST_LABEL_CHARS = 128
_PARAM_OF_HEADER = {TENANT_HEADER: TENANT_PARAM, DOMAIN_HEADER: DOMAIN_PARAM}


def label_from_headers(manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
    """Hook before `TokenizerManager.generate_request`: move our headers into the request's sampling parameters.

    obj: SGLang's GenerateReqInput, whose sampling_params are a dict, a list of them (one a prompt), or None.
    request: FastAPI's request; None for SGLang's own, such as the warm-up.
    """
    if request is None:
        return
    labels = {param: request.headers[name] for name, param in _PARAM_OF_HEADER.items() if name in request.headers}
    if not labels:
        return
    if isinstance(obj.sampling_params, list):
        obj.sampling_params = [_with_params(params, labels) for params in obj.sampling_params]
    else:
        obj.sampling_params = _with_params(obj.sampling_params or {}, labels)


def _with_params(sampling_params: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    return sampling_params | {"custom_params": (sampling_params.get("custom_params") or {}) | labels}


def labels_of(request_id: str, custom_params: Mapping[str, Any] | None) -> Labels:
    """The labels of a request in the scheduler: 'default' where none is given. Cut at 128 characters."""
    params = custom_params or {}
    domain, separator, _ = request_id.partition(DOMAIN_SEPARATOR)
    by_id = domain if separator and domain else DEFAULT_LABEL
    return Labels(
        tenant=_label(params.get(TENANT_PARAM), DEFAULT_LABEL), domain=_label(params.get(DOMAIN_PARAM), by_id)
    )


def _label(given: object, otherwise: str) -> str:
    """A client may write anything into its request."""
    return given[:MOST_LABEL_CHARS] if isinstance(given, str) and given else otherwise[:MOST_LABEL_CHARS]
