{{/* Gateways that a route attaches to: (dict "root" $ "listener" name). */}}
{{- define "gammaray.parentRefs" -}}
{{- if .root.Values.gateway.className -}}
- name: {{ include "gammaray.fullname" .root | quote }}
  sectionName: {{ .listener }}
{{- else if .root.Values.gateway.parentRefs -}}
{{- toYaml .root.Values.gateway.parentRefs -}}
{{- else -}}
{{- fail "gateway.parentRefs: needed where gateway.className is empty" -}}
{{- end -}}
{{- end -}}
