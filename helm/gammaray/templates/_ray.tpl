{{/* Custom Ray resource of a node, by which Serve places one replica of its role there; quoted for KubeRay's shell. */}}
{{- define "gammaray.logicalResource" -}}
{{ printf `"{\"gammaray_%s\": 1}"` . | squote }}
{{- end -}}

{{/* External Redis for Ray's control state. */}}
{{- define "gammaray.faultTolerance" -}}
{{- $given := .Values.ray.faultTolerance -}}
{{- $bundled := not .Values.redis.urlSecret.name -}}
{{- if $given.redisAddress -}}
redisAddress: {{ $given.redisAddress | quote }}
{{- with $given.username }}
redisUsername: {value: {{ . | quote }}}
{{- end }}
{{- with $given.passwordSecret }}
{{- if .name }}
redisPassword:
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- else if $given.username -}}
{{- fail "ray.faultTolerance.username: needs ray.faultTolerance.redisAddress" -}}
{{- else if $bundled -}}
redisAddress: {{ include "gammaray.fullname" . | printf "%s-redis:6379" | quote }}
redisPassword:
  valueFrom:
    secretKeyRef: {{ include "gammaray.redisPasswordRef" . }}
{{- else -}}
{{- fail "ray.faultTolerance.redisAddress: needed where redis.urlSecret is given" -}}
{{- end -}}
{{- end -}}
