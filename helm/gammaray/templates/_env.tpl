{{/* The chart's own environment of every Ray container: (dict "root" $ "component" name "values" pod values). */}}
{{- define "gammaray.rayEnv" -}}
{{- $values := .root.Values -}}
{{- $generated := include "gammaray.generated" .root | fromYaml -}}
{{- range $name, $value := $generated.environment }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
# The only writable directories; the root file system is read-only.
- name: HOME
  value: /tmp
# A user that the cluster assigns has no entry in /etc/passwd, where Python otherwise looks for the name.
- name: USER
  value: gammaray
- name: TRITON_CACHE_DIR
  value: /tmp/triton
- name: VLLM_CACHE_ROOT
  value: /tmp/vllm
- name: HF_HOME
  value: /models/huggingface
# On SIGTERM Ray drains the node for this long, so that Serve moves its replicas; the last 10 s are for shutdown.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ max 0 (sub (int .values.terminationGracePeriodSeconds) 10) | quote }}
{{ include "gammaray.redisEnv" .root }}
{{- with $values.huggingFaceTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- if and $values.modelCache.enabled $values.modelCache.download.enabled (ne .component "head") }}
# A Job downloads the models.
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{ include "gammaray.telemetryEnv" .root }}
{{- end -}}

{{/* URL and password of the session store. */}}
{{- define "gammaray.redisEnv" -}}
{{- with .Values.redis.urlSecret -}}
{{- if .name -}}
- name: GAMMARAY_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
# Other releases may use the same database.
- name: GAMMARAY_REDIS_PREFIX
  value: {{ printf "%s.%s" $.Release.Namespace (include "gammaray.fullname" $) | quote }}
{{- else -}}
- name: GAMMARAY_REDIS_URL
  value: {{ printf "redis://%s-redis:6379/0" (include "gammaray.fullname" $) | quote }}
{{- end -}}
{{- if or (not .name) $.Values.redis.passwordSecret.name }}
# Separate from the URL, in which a password with : / @ # % or a space would need encoding.
- name: GAMMARAY_REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {{ include "gammaray.redisPasswordRef" $ }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Secret and key with Redis' password. */}}
{{- define "gammaray.redisPasswordRef" -}}
{{- $given := .Values.redis.passwordSecret -}}
{{- if $given.name -}}
{name: {{ $given.name | quote }}, key: {{ $given.key | quote }}}
{{- else -}}
{name: {{ include "gammaray.fullname" . | printf "%s-redis" | quote }}, key: password}
{{- end -}}
{{- end -}}

{{/* Export of spans; empty without an endpoint. */}}
{{- define "gammaray.telemetryEnv" -}}
{{- with include "gammaray.otlpEndpoint" . -}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $.Values.telemetry.traceShare | quote }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)
{{- end -}}
{{- end -}}

{{- define "gammaray.otlpEndpoint" -}}
{{- $telemetry := .Values.telemetry -}}
{{- if $telemetry.collector.enabled -}}
http://{{ include "gammaray.fullname" . }}-collector:4317
{{- else if $telemetry.otlpEndpoint -}}
{{- $telemetry.otlpEndpoint -}}
{{- else if $telemetry.jaeger.enabled -}}
http://{{ include "gammaray.fullname" . }}-jaeger:4317
{{- end -}}
{{- end -}}
