{{/* Volumes of a Ray pod: (dict "root" $ "component" name "values" pod values). */}}
{{- define "gammaray.volumes" -}}
{{- $values := .root.Values -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .values.tmpSize | quote }}}
- name: models
  {{- if $values.modelCache.enabled }}
  persistentVolumeClaim:
    claimName: {{ include "gammaray.modelsClaim" .root | quote }}
  {{- else }}
  emptyDir: {sizeLimit: {{ .values.modelsSize | quote }}}
  {{- end }}
{{- with .values.shmSize }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}
{{- end }}
{{- if and (eq .component "orchestrator") $values.apiKeysSecret.name }}
- name: api-keys
  secret:
    secretName: {{ $values.apiKeysSecret.name | quote }}
{{- end }}
{{- if and (eq .component "orchestrator") $values.receiptKeysSecret.name }}
- name: receipt-keys
  secret:
    secretName: {{ $values.receiptKeysSecret.name | quote }}
{{- end }}
{{- if and $values.workerTls.enabled (ne .component "head") }}
{{- $holder := ternary "orchestrator" "worker" (eq .component "orchestrator") }}
- name: worker-tls
  secret:
    secretName: {{ include "gammaray.workerTlsSecret" (dict "root" .root "holder" $holder) | quote }}
{{- end }}
{{- with .values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Mounts of these volumes. */}}
{{- define "gammaray.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models}
{{- if .values.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if and (eq .component "orchestrator") .root.Values.apiKeysSecret.name }}
- {name: api-keys, mountPath: /etc/gammaray/keys, readOnly: true}
{{- end }}
{{- if and (eq .component "orchestrator") .root.Values.receiptKeysSecret.name }}
- {name: receipt-keys, mountPath: /etc/gammaray/receipts, readOnly: true}
{{- end }}
{{- if and .root.Values.workerTls.enabled (ne .component "head") }}
- {name: worker-tls, mountPath: /etc/gammaray/tls, readOnly: true}
{{- end }}
{{- with .values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name of the claim with the shared models. */}}
{{- define "gammaray.modelsClaim" -}}
{{- .Values.modelCache.existingClaim | default (printf "%s-models" (include "gammaray.fullname" .)) -}}
{{- end -}}

{{/* Storage class of a claim, given as a string; as in Helm's own charts, "-" is no class. */}}
{{- define "gammaray.storageClass" -}}
{{- with . -}}
storageClassName: {{ ternary "" . (eq . "-") | quote }}
{{- end -}}
{{- end -}}
