"""OpenAI's client against a gateway that serves TLS: `URL CA WRONG_CA`. With another authority it must not send anything."""

import ssl
import sys

import openai

url, ca, wrong_ca = sys.argv[1:]


def client(authority):
    trusted = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=authority))
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=trusted)


assert "echo" in [model.id for model in client(ca).models.list()]
try:
    client(wrong_ca).models.list()
except openai.APIConnectionError as refused:
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused.__cause__), repr(refused.__cause__)
else:
    raise AssertionError("an unknown authority is trusted")
