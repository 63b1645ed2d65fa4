"""A worker for NVIDIA Dynamo on CPUs: `BatchEngine` behind its frontend, which routes requests to cached prefixes.

    pip install '.[cluster,grammar,text]' 'pydantic<2.14' uvloop aiohttp transformers prometheus-client  # in a clone
    pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    export DYN_FILE_KV=/tmp/dynamo
    python -m kvcache.integrations.dynamo --model FOLDER --store /var/cache/kvcache
    python -m dynamo.frontend --discovery-backend file --request-plane tcp --event-plane zmq --router-mode kv

The worker tells the router which blocks it has (`kv_events`) and how full it is, ends what a client leaves, and takes
all samples, log-probabilities, grammars and salts of a request. With `--store` or `--redis` workers share cached
prefixes: one that gets another one's request, or was started again, reads them from there. Requests with a salt share
prefixes with those of the same salt alone, and go where these are.
"""
