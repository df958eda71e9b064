"""botocore's model of SQS in both protocols, for tests that speak or check them.

Today's botocore speaks JSON only. Its model of the Query protocol is made here as AWS published it until 2023: with the
names of items of lists and maps, and the wrappers of results.
"""

import copy
from functools import cache
from typing import Any, Final, Literal

from botocore.loaders import Loader
from botocore.model import ServiceModel

Protocol = Literal["json", "query"]

_ITEM_NAMES: Final = {
    "AWSAccountIdList": "AWSAccountId",
    "ActionNameList": "ActionName",
    "AttributeNameList": "AttributeName",
    "BatchResultErrorEntryList": "BatchResultErrorEntry",
    "BinaryList": "BinaryListValue",
    "ChangeMessageVisibilityBatchRequestEntryList": "ChangeMessageVisibilityBatchRequestEntry",
    "ChangeMessageVisibilityBatchResultEntryList": "ChangeMessageVisibilityBatchResultEntry",
    "DeleteMessageBatchRequestEntryList": "DeleteMessageBatchRequestEntry",
    "DeleteMessageBatchResultEntryList": "DeleteMessageBatchResultEntry",
    "ListMessageMoveTasksResultEntryList": "ListMessageMoveTasksResultEntry",
    "MessageAttributeNameList": "MessageAttributeName",
    "MessageList": "Message",
    "MessageSystemAttributeList": "MessageSystemAttributeName",
    "QueueUrlList": "QueueUrl",
    "SendMessageBatchRequestEntryList": "SendMessageBatchRequestEntry",
    "SendMessageBatchResultEntryList": "SendMessageBatchResultEntry",
    "StringList": "StringListValue",
    "TagKeyList": "TagKey",
}
_MAP_NAMES: Final = {
    "MessageBodyAttributeMap": ("MessageAttribute", "Name"),
    "MessageBodySystemAttributeMap": ("MessageSystemAttribute", "Name"),
    "MessageSystemAttributeMap": ("Attribute", "Name"),
    "QueueAttributeMap": ("Attribute", "Name"),
    "TagMap": ("Tag", "Key"),
}


@cache
def service_model(protocol: Protocol) -> ServiceModel:
    """The service model of SQS for a protocol."""
    model = Loader().load_service_model("sqs", "service-2")
    return ServiceModel(model if protocol == "json" else query_model(model), "sqs")


def query_model(model: dict[str, Any]) -> dict[str, Any]:
    """The model as it is for the Query protocol. A loader that returns it makes boto3 speak Query."""
    model = copy.deepcopy(model)
    metadata = model["metadata"]
    metadata |= {
        "protocol": "query",
        "protocols": ["query"],
        "xmlNamespace": "http://queue.amazonaws.com/doc/2012-11-05/",
    }
    for name in ("awsQueryCompatible", "jsonVersion", "targetPrefix"):
        del metadata[name]
    for operation in model["operations"].values():
        if "output" in operation:
            operation["output"]["resultWrapper"] = operation["output"]["shape"]
    shapes = model["shapes"]
    for name, item in _ITEM_NAMES.items():
        shapes[name]["member"]["locationName"] = item
        shapes[name]["flattened"] = True
    for name, (_, key) in _MAP_NAMES.items():
        shapes[name]["key"]["locationName"] = key
        shapes[name]["value"]["locationName"] = "Value"
    for shape in shapes.values():
        for member in shape.get("members", {}).values():
            if member["shape"] in _MAP_NAMES:
                member["locationName"] = _MAP_NAMES[member["shape"]][0]
            elif member["shape"] in _ITEM_NAMES:
                member["locationName"] = _ITEM_NAMES[member["shape"]]
    return model
